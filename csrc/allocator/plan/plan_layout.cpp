#include "allocator/plan/plan_layout.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

using Order = std::vector<std::size_t>;

struct Placed {
  std::vector<std::size_t> offsets; ///< one per request
  std::size_t top = 0;
};

void check(const PlanRequest& request) {
  if (request.bytes > kLargestRequest) {
    throw InvalidArgument("a request of " + format_bytes(request.bytes) + " in a plan; no machine has that much");
  }
  if (request.end <= request.begin) {
    throw InvalidArgument("a request that begins at event " + std::to_string(request.begin) + " and ends at event " +
                          std::to_string(request.end) + "; it has to end later");
  }
}

/// Peak of the requested bytes.
std::size_t peak_live_bytes(const std::vector<PlanRequest>& requests) {
  std::vector<std::tuple<std::uint32_t, bool, std::size_t>> events; // when, whether it allocates, bytes
  for (const PlanRequest& request : requests) {
    events.emplace_back(request.begin, true, request.bytes);
    events.emplace_back(request.end, false, request.bytes);
  }
  std::ranges::sort(events); // at one time, frees come first
  std::size_t live = 0, peak = 0;
  for (const auto& [when, allocates, bytes] : events) {
    live = allocates ? live + bytes : live - bytes;
    peak = std::max(peak, live);
  }
  return peak;
}

Placed place(const std::vector<PlanRequest>& requests, const Order& order) {
  struct Piece {
    std::size_t offset, top;
    std::uint32_t begin, end;
  };
  std::vector<Piece> pieces; // by offset
  Placed placed{std::vector<std::size_t>(requests.size()), 0};
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
    placed.top = std::max(placed.top, best + bytes);
    pieces.insert(std::ranges::upper_bound(pieces, best, {}, &Piece::offset),
                  {best, best + bytes, request.begin, request.end});
  }
  return placed;
}

} // namespace

PlanLayout lay_out(const std::vector<PlanRequest>& requests) {
  std::uint32_t last = 0;
  for (const PlanRequest& request : requests) {
    check(request);
    last = std::max({last, request.begin, request.end == kNoEnd ? 0 : request.end});
  }
  const std::size_t peak = peak_live_bytes(requests);
  Placed best;
  const auto consider = [&](const auto& key) {
    Order order(requests.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) { return key(requests[i]); });
    Placed placed = place(requests, order);
    if (best.offsets.empty() || placed.top < best.top) {
      best = std::move(placed);
    }
  };
  const auto bytes = [](const PlanRequest& request) { return static_cast<double>(request.bytes); };
  const auto life = [=](const PlanRequest& request) {
    return static_cast<double>(std::min(request.end, last) - request.begin) + 1;
  };
  consider([=](const PlanRequest& request) { return std::pair(bytes(request), life(request)); });
  consider([=](const PlanRequest& request) { return bytes(request) * life(request); });
  consider(life);
  return {std::move(best.offsets), best.top, peak};
}

} // namespace torch_uvm
