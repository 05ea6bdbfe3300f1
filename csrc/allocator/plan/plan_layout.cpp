#include "allocator/plan/plan_layout.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "allocator/size_classes.h"

namespace torch_uvm {
namespace {

using Order = std::vector<std::size_t>;

PlanLayout place(const std::vector<PlanRequest>& requests, const Order& order) {
  struct Piece {
    std::size_t offset, top;
    std::uint32_t begin, end;
  };
  std::vector<Piece> pieces; // by offset
  PlanLayout placed{std::vector<std::size_t>(requests.size()), 0};
  for (const std::size_t i : order) {
    const PlanRequest& request = requests[i];
    const std::size_t bytes = round_up(request.bytes, kBlockAlignment);
    constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
    std::size_t free_from = 0; // end of the highest overlapping piece so far
    std::size_t best = 0, best_gap = kNone;
    for (const Piece& piece : pieces) {
      if (piece.begin < request.end && request.begin < piece.end) {
        if (piece.offset >= free_from + bytes && piece.offset - free_from < best_gap) {
          best = free_from;
          best_gap = piece.offset - free_from;
        }
        free_from = std::max(free_from, piece.top);
      }
    }
    best = best_gap == kNone ? free_from : best;
    placed.offsets[i] = best;
    placed.bytes = std::max(placed.bytes, best + bytes);
    pieces.insert(std::ranges::upper_bound(pieces, best, {}, &Piece::offset),
                  {best, best + bytes, request.begin, request.end});
  }
  return placed;
}

} // namespace

PlanLayout lay_out(const std::vector<PlanRequest>& requests) {
  PlanLayout best;
  const auto consider = [&](const auto& key) {
    Order order(requests.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) { return key(requests[i]); });
    PlanLayout placed = place(requests, order);
    if (best.offsets.empty() || placed.bytes < best.bytes) {
      best = std::move(placed);
    }
  };
  const auto bytes = [](const PlanRequest& request) { return static_cast<double>(request.bytes); };
  const auto life = [](const PlanRequest& request) { return static_cast<double>(request.end - request.begin) + 1; };
  consider([=](const PlanRequest& request) { return std::pair(bytes(request), life(request)); });
  consider([=](const PlanRequest& request) { return bytes(request) * life(request); });
  consider(life);
  return best;
}

} // namespace torch_uvm
