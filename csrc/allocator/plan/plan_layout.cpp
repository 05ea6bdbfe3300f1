#include "allocator/plan/plan_layout.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>

#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Maximum comparisons of lifetimes, after the first order.
constexpr std::size_t kComparisons = 400'000'000;
/// Maximum attempts to lower the top, after the initial orders.
constexpr int kTries = 64;

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

/// The order of the requests by descending `key`.
template <typename Key>
Order sorted(const std::vector<PlanRequest>& requests, Key key) {
  Order order(requests.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(), [&](std::size_t i) { return key(requests[i]); });
  return order;
}

} // namespace

PlanLayout lay_out(const std::vector<PlanRequest>& requests) {
  std::uint32_t last = 0;
  for (const PlanRequest& request : requests) {
    check(request);
    last = std::max({last, request.begin, request.end == kNoEnd ? 0 : request.end});
  }
  const std::size_t peak = peak_live_bytes(requests);
  const std::size_t comparisons = std::max<std::size_t>(requests.size() * requests.size() / 2, 1);
  Order best_order;
  Placed best;
  std::size_t orders = 0;
  const auto done = [&] { // good enough, or too long
    return orders > 0 && (best.top <= peak + peak / 500 || orders * comparisons > kComparisons);
  };
  const auto consider = [&](Order order) {
    if (done()) {
      return;
    }
    Placed placed = place(requests, order);
    if (++orders == 1 || placed.top <= best.top) {
      best = std::move(placed);
      best_order = std::move(order);
    }
  };
  const auto bytes = [](const PlanRequest& request) { return static_cast<double>(request.bytes); };
  const auto life = [=](const PlanRequest& request) {
    return static_cast<double>(std::min(request.end, last) - request.begin) + 1;
  };
  consider(sorted(requests, [&](const PlanRequest& request) { return std::pair(bytes(request), life(request)); }));
  consider(sorted(requests, [&](const PlanRequest& request) { return bytes(request) * life(request); }));
  consider(sorted(requests, life));
  std::minstd_rand random(20);
  for (int i = 0; i < kTries && !done(); ++i) {
    Order order = best_order;
    for (std::size_t at = 0; at < order.size(); ++at) {
      const std::size_t which = best_order[at];
      if (best.offsets[which] + round_up(requests[which].bytes, kBlockAlignment) == best.top) {
        const auto here = order.begin() + static_cast<std::ptrdiff_t>(at);
        std::rotate(order.begin() + static_cast<std::ptrdiff_t>(random() % (at + 1)), here, here + 1);
      }
    }
    consider(std::move(order));
  }
  return {std::move(best.offsets), best.top, peak};
}

} // namespace torch_uvm
