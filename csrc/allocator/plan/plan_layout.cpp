#include "allocator/plan/plan_layout.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <utility>

#include "allocator/plan/plan_placement.h"
#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Maximum lifetime comparisons for the layout of one stream, and for a single order.
constexpr std::uint64_t kComparisons = 600'000'000;
constexpr std::uint64_t kComparisonsOfAnOrder = 300'000'000;
/// The smallest requests, which are placed by the sweep, have at most 1/kSmallPart of the peak. With at most kAlwaysAll
/// requests, all of them are placed into gaps.
constexpr std::size_t kSmallPart = 200;
constexpr std::size_t kAlwaysAll = 1000;
/// Maximum attempts to lower the top, after the initial orders.
constexpr int kTries = 64;

/// A layout up to 0.2% above the lower bound ends the search.
std::size_t good_enough(std::size_t peak) {
  return peak + peak / 500;
}

struct Placed {
  std::vector<std::size_t> offsets; ///< one per piece
  std::size_t top = 0;
};

using Order = std::vector<std::uint32_t>;

std::uint64_t comparisons(std::size_t pieces) {
  return static_cast<std::uint64_t>(pieces) * pieces / 2;
}

Placed place_in_order(const std::vector<PlanPiece>& pieces, const Order& order) {
  GapPlacement placement;
  Placed placed;
  placed.offsets.resize(pieces.size());
  for (const std::uint32_t i : order) {
    placed.offsets[i] = placement.place(pieces[i]);
  }
  placed.top = placement.top();
  return placed;
}

/// The order of the pieces by descending `key`, then by descending lifetime, then by index.
template <typename Key>
Order sorted(const std::vector<PlanPiece>& pieces, Key key) {
  Order order(pieces.size());
  std::iota(order.begin(), order.end(), 0U);
  std::ranges::stable_sort(order, [&](std::uint32_t left, std::uint32_t right) {
    const PlanPiece &a = pieces[left], &b = pieces[right];
    return std::pair(key(a), std::int64_t{a.end} - a.begin) > std::pair(key(b), std::int64_t{b.end} - b.begin);
  });
  return order;
}

/// The best layout of several orders, and then of variants that place the pieces at the top earlier.
/// \param bound peak live bytes of the pieces, a lower bound
Placed place_best(const std::vector<PlanPiece>& pieces, std::size_t bound) {
  const std::int32_t last =
      std::accumulate(pieces.begin(), pieces.end(), 0, [](std::int32_t latest, const PlanPiece& piece) {
        return std::max({latest, piece.begin, piece.end == std::numeric_limits<std::int32_t>::max() ? 0 : piece.end});
      });
  const auto life = [=](const PlanPiece& piece) {
    return static_cast<double>(std::min(piece.end, last) - piece.begin) + 1;
  };
  const auto bytes = [](const PlanPiece& piece) { return static_cast<double>(piece.bytes); };
  Order best_order;
  Placed best;
  std::uint64_t spent = 0;
  const auto consider = [&](Order order) {
    Placed placed = place_in_order(pieces, order);
    spent += comparisons(pieces.size());
    if (best_order.empty() || placed.top <= best.top) {
      best = std::move(placed);
      best_order = std::move(order);
    }
  };
  const auto done = [&] { return best.top <= good_enough(bound) || spent + comparisons(pieces.size()) > kComparisons; };
  consider(sorted(pieces, bytes));
  if (!done()) {
    consider(sorted(pieces, [&](const PlanPiece& piece) { return bytes(piece) * life(piece); }));
  }
  if (!done()) {
    consider(sorted(pieces, life));
  }
  std::minstd_rand random(20);
  for (int i = 0; i < kTries && !done(); ++i) {
    Order order = best_order;
    for (std::size_t at = 0; at < order.size(); ++at) {
      if (best.offsets[best_order[at]] + pieces[best_order[at]].bytes == best.top) {
        const std::size_t earlier = random() % (at + 1);
        std::rotate(order.begin() + static_cast<std::ptrdiff_t>(earlier),
                    order.begin() + static_cast<std::ptrdiff_t>(at),
                    order.begin() + static_cast<std::ptrdiff_t>(at) + 1);
      }
    }
    consider(std::move(order));
  }
  return best;
}

/// Largest size of a piece that counts as small; 0: none does.
std::size_t largest_small(const std::vector<PlanPiece>& pieces, const PlanEvents& events, std::size_t peak) {
  if (pieces.size() <= kAlwaysAll) {
    return 0;
  }
  std::vector<std::size_t> sizes;
  for (const PlanPiece& piece : pieces) {
    sizes.push_back(piece.bytes);
  }
  std::ranges::sort(sizes);
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  const auto first_large =
      std::ranges::partition_point(sizes, [&](std::size_t bytes) { return events.peak(bytes) <= peak / kSmallPart; });
  return first_large == sizes.begin() ? 0 : *std::prev(first_large);
}

/// `gaps` selects the pieces that are placed into gaps. The sweep places the others above them.
template <typename Gaps>
Placed place_parts(const std::vector<PlanPiece>& pieces, Gaps gaps) {
  std::vector<PlanPiece> parts[2];
  std::vector<std::size_t> indices[2];
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const int part = gaps(i) ? 0 : 1;
    parts[part].push_back(pieces[i]);
    indices[part].push_back(i);
  }
  Placed placed;
  if (!parts[0].empty()) {
    placed = place_best(parts[0], PlanEvents(parts[0]).peak(std::numeric_limits<std::size_t>::max()));
  }
  std::vector<std::size_t> offsets[2] = {std::move(placed.offsets), {}};
  placed.top = sweep(parts[1], placed.top, offsets[1]);
  placed.offsets.assign(pieces.size(), 0);
  for (int part = 0; part < 2; ++part) {
    for (std::size_t i = 0; i < indices[part].size(); ++i) {
      placed.offsets[indices[part][i]] = offsets[part][i];
    }
  }
  return placed;
}

/// \param pieces of one stream, sorted by begin
Placed place(const std::vector<PlanPiece>& pieces) {
  Placed swept;
  swept.top = sweep(pieces, 0, swept.offsets);
  const PlanEvents events(pieces);
  const std::size_t peak = events.peak(std::numeric_limits<std::size_t>::max());
  if (swept.top <= good_enough(peak)) {
    return swept;
  }
  const std::size_t small = largest_small(pieces, events, peak);
  const auto count = static_cast<std::size_t>(
      std::ranges::count_if(pieces, [=](const PlanPiece& piece) { return piece.bytes > small; }));
  Placed placed;
  if (comparisons(count) <= kComparisonsOfAnOrder) {
    placed = place_parts(pieces, [&](std::size_t i) { return pieces[i].bytes > small; });
  } else {
    std::size_t largest = 0;
    while (comparisons(largest + 1000) <= kComparisonsOfAnOrder) {
      largest += 1000;
    }
    const Order order = sorted(pieces, [](const PlanPiece& piece) { return static_cast<double>(piece.bytes); });
    std::vector<bool> chosen(pieces.size());
    std::for_each_n(order.begin(), largest, [&](std::uint32_t i) { chosen[i] = true; });
    placed = place_parts(pieces, [&](std::size_t i) { return chosen[i]; });
  }
  return placed.top <= swept.top ? placed : swept;
}

void check(const PlanRequest& request) {
  if (request.bytes > kLargestRequest) {
    throw InvalidArgument("a request of " + format_bytes(request.bytes) + " in a plan; no machine has that much");
  }
  if (request.end <= request.begin) {
    throw InvalidArgument("a request that begins at event " + std::to_string(request.begin) + " and ends at event " +
                          std::to_string(request.end) + "; it has to end later");
  }
}

/// Peak of the requested bytes over all streams.
std::size_t peak_live_bytes(const std::vector<PlanPiece>& pieces) {
  return PlanEvents(pieces).peak(std::numeric_limits<std::size_t>::max());
}

} // namespace

PlanLayout lay_out(const std::vector<PlanRequest>& requests) {
  // Replace event indices by their ranks, in 32-bit signed integers, which vector instructions compare best.
  std::vector<std::uint32_t> times;
  for (const PlanRequest& request : requests) {
    check(request);
    times.push_back(request.begin);
    if (request.end != kNoEnd) {
      times.push_back(request.end);
    }
  }
  std::ranges::sort(times);
  times.erase(std::unique(times.begin(), times.end()), times.end());
  const auto rank = [&](std::uint32_t time) {
    return time == kNoEnd ? std::numeric_limits<std::int32_t>::max()
                          : static_cast<std::int32_t>(std::ranges::lower_bound(times, time) - times.begin());
  };

  PlanLayout layout;
  layout.offsets.assign(requests.size(), 0);
  std::vector<PlanPiece> asked;
  std::vector<std::vector<std::size_t>> by_stream; // indices of requests
  std::map<Stream, std::size_t> streams; // stream -> index in by_stream
  for (std::size_t i = 0; i < requests.size(); ++i) {
    const PlanRequest& request = requests[i];
    asked.push_back({request.bytes, rank(request.begin), rank(request.end)});
    const auto [found, is_new] = streams.emplace(request.stream, by_stream.size());
    if (is_new) {
      by_stream.emplace_back();
      layout.regions.push_back({request.stream, 0, 0});
    }
    if (request.bytes > 0) {
      by_stream[found->second].push_back(i);
    }
  }
  layout.peak_live_bytes = peak_live_bytes(asked);
  for (std::size_t r = 0; r < by_stream.size(); ++r) {
    std::vector<std::size_t>& members = by_stream[r];
    std::ranges::stable_sort(members, {}, [&](std::size_t i) { return asked[i].begin; });
    std::vector<PlanPiece> pieces;
    for (const std::size_t i : members) {
      pieces.push_back({piece_bytes(asked[i].bytes), asked[i].begin, asked[i].end});
    }
    const Placed placed = place(pieces);
    PlanRegion& region = layout.regions[r];
    region.offset = layout.bytes;
    region.bytes = round_up(placed.top, kBlockAlignment);
    layout.bytes += region.bytes;
    for (std::size_t i = 0; i < members.size(); ++i) {
      layout.offsets[members[i]] = region.offset + placed.offsets[i];
    }
  }
  return layout;
}

} // namespace torch_uvm
