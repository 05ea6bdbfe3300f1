// Which blocks to evict so that a request finds contiguous memory.
#include <algorithm>
#include <compare>
#include <tuple>
#include <vector>

#include "allocator/caching/state.h"

namespace torch_uvm {

namespace {

/// Cost of evicting a set of blocks. Fields are compared in this order.
struct Price {
  double cost = 0;
  std::size_t allocated = 0; ///< bytes of allocated blocks, which their owners would lose
  std::size_t pending = 0; ///< bytes of pending blocks, which the host would wait for
  std::size_t bytes = 0;

  auto operator<=>(const Price&) const = default;
  void add(const Price& other) {
    cost += other.cost, allocated += other.allocated, pending += other.pending, bytes += other.bytes;
  }
  void take_away(const Price& other) {
    allocated -= other.allocated, pending -= other.pending, bytes -= other.bytes;
    cost = allocated == 0 ? 0 : cost - other.cost; // resets rounding errors
  }
};

Price price_of(const Block& block, const BlockCost& cost) {
  switch (block.state) {
    case BlockState::kFree:
      return {0, 0, 0, block.bytes};
    case BlockState::kPending:
      return {0, 0, block.bytes, block.bytes};
    case BlockState::kReserved:
      return {kNever, 0, 0, block.bytes};
    case BlockState::kAllocated:
      break;
  }
  const double price = cost(block.tag, block.bytes);
  return {price < kNever ? std::max(price, 0.0) : kNever, block.bytes, 0, block.bytes};
}

/// Contiguous blocks of one segment, first and last included.
struct Window {
  const Block* first = nullptr;
  const Block* last = nullptr;
  Price price;
};

/// A segment all of whose blocks may be evicted.
struct Candidate {
  const Segment* segment = nullptr;
  Price price;

  double density() const {
    return price.cost / static_cast<double>(segment->bytes);
  }
};

/// \param last nullptr: the segment's last block
void add_tags(const Block* first, const Block* last, std::vector<void*>& tags) {
  for (const Block* block = first; block != nullptr; block = block == last ? nullptr : block->after) {
    if (block->state == BlockState::kAllocated) {
      tags.push_back(block->tag);
    }
  }
}

std::vector<void*> tags_of(const Block* first, const Block* last) {
  std::vector<void*> tags;
  add_tags(first, last, tags);
  return tags;
}

void check_bytes_of_run(std::size_t bytes) {
  if (bytes == 0 || bytes > kLargestRequest) {
    throw InvalidArgument("a run of " + std::to_string(bytes) + " bytes; at least 1 and at most " +
                          std::to_string(kLargestRequest));
  }
}

/// Updates `best` with the cheapest window of at least `bytes` among neighbours that may be evicted, from `block` on.
/// \param all receives the prices of all blocks that are looked at
/// \return the last block looked at: the first that may not be evicted, or the segment's last
const Block* walk_run(const Block* block, std::size_t bytes, const BlockCost& cost, std::optional<Window>& best,
                      Price& all) {
  Window window;
  std::vector<Price> prices; // of the blocks in the window, preceded by those it has moved past
  std::size_t first = 0; // index of the window's first block in `prices`
  for (;; block = block->after) {
    const Price price = price_of(*block, cost);
    all.add(price);
    if (price.cost == kNever) {
      return block;
    }
    if (window.first == nullptr) {
      window.first = block;
    }
    window.last = block;
    window.price.add(price);
    prices.push_back(price);
    while (window.price.bytes - prices[first].bytes >= bytes) {
      window.price.take_away(prices[first++]);
      window.first = window.first->after;
    }
    if (window.price.bytes >= bytes && (!best || window.price < best->price)) {
      best = window;
    }
    if (block->after == nullptr) {
      return block;
    }
  }
}

/// The segments of a home all of whose blocks may be evicted.
/// \param best as of walk_run
std::vector<Candidate> candidates_of(const Heap::Segments& segments, Location home, std::size_t bytes,
                                     const BlockCost& cost, std::optional<Window>& best) {
  std::vector<Candidate> candidates;
  for (const auto& [address, segment] : segments) {
    if (segment.home != home) {
      continue;
    }
    Price all;
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      block = walk_run(block, bytes, cost, best, all);
    }
    if (all.cost < kNever) {
      candidates.push_back({&segment, all});
    }
  }
  return candidates;
}

/// A set of segments that together have at least `bytes`, at no more than twice the minimum cost. Greedy by cost per
/// byte: a segment that does not complete the partial set is added to it; a segment that completes it yields a
/// candidate set, and the cheapest candidate wins.
std::vector<Candidate> cheapest_cover(std::vector<Candidate> candidates, std::size_t bytes) {
  std::ranges::sort(candidates, [](const Candidate& left, const Candidate& right) {
    return std::tuple(left.density(), left.price.allocated, left.price.pending) <
           std::tuple(right.density(), right.price.allocated, right.price.pending);
  });
  std::vector<Candidate> partial;
  std::size_t covered = 0;
  double spent = 0;
  std::vector<Candidate> best;
  double least = kNever;
  for (const Candidate& candidate : candidates) {
    if (covered + candidate.segment->bytes < bytes) {
      partial.push_back(candidate);
      covered += candidate.segment->bytes;
      spent += candidate.price.cost;
    } else if (spent + candidate.price.cost < least) {
      least = spent + candidate.price.cost;
      best = partial;
      best.push_back(candidate);
    }
  }
  // Drop segments that the others make unnecessary, the most expensive first.
  std::size_t total = 0;
  for (const Candidate& candidate : best) {
    total += candidate.segment->bytes;
  }
  std::ranges::sort(best, std::greater{}, [](const Candidate& candidate) { return candidate.price.cost; });
  std::erase_if(best, [&](const Candidate& candidate) {
    const bool spare = total - candidate.segment->bytes >= bytes;
    total -= spare ? candidate.segment->bytes : 0;
    return spare;
  });
  return best;
}

/// The tags of all allocated blocks, in address order.
std::vector<void*> tags_of(std::vector<Candidate> segments) {
  std::ranges::sort(segments, {}, [](const Candidate& candidate) { return candidate.segment->address; });
  std::vector<void*> tags;
  for (const Candidate& candidate : segments) {
    add_tags(candidate.segment->first, nullptr, tags);
  }
  return tags;
}

} // namespace

std::optional<std::vector<void*>> CachingManagedAllocator::min_cost_range(std::size_t bytes, int device,
                                                                          const BlockCost& cost) const {
  const State& state = *state_;
  state.check_device(device);
  check_bytes_of_run(bytes);
  const std::lock_guard lock(state.mutex);
  const Location home = Location::device(device);
  const std::size_t needed = state.bytes_for(bytes, home);
  std::optional<Window> best;
  std::vector<Candidate> candidates = candidates_of(state.heap.segments(), home, needed, cost, best);
  // Bytes to free for a new segment: the excess over the cap; if the source has refused, the size of the segment
  // itself.
  const DeviceCap& cap = state.caps[static_cast<std::size_t>(device)];
  const std::size_t own = round_up(needed, kLargeGranularity);
  std::size_t wanting = own;
  if (cap.cap && !cap.refused) {
    wanting = state.excess(home, state.class_of(bytes, home), own);
  }
  std::size_t unused = 0;
  for (const Candidate& candidate : candidates) {
    unused += candidate.segment->used == 0 ? candidate.segment->bytes : 0;
  }
  if (unused >= wanting) {
    return std::vector<void*>();
  }
  if (best) {
    return tags_of(best->first, best->last);
  }
  if (cap.cap && own > *cap.cap) {
    return std::nullopt;
  }
  const std::vector<Candidate> cover = cheapest_cover(std::move(candidates), wanting);
  return cover.empty() ? std::nullopt : std::optional(tags_of(cover));
}

std::optional<std::vector<void*>> CachingManagedAllocator::min_cost_range_near(std::vector<const Block*> blocks,
                                                                               std::size_t bytes, int device,
                                                                               const BlockCost& cost) const {
  const State& state = *state_;
  state.check_device(device);
  check_bytes_of_run(bytes);
  const std::lock_guard lock(state.mutex);
  const std::size_t needed = state.bytes_for(bytes, Location::device(device));
  std::ranges::sort(blocks, {}, &Block::address);
  std::optional<Window> best;
  Price all;
  const Block* last = nullptr; // that was looked at
  for (const Block* first : blocks) {
    if (last != nullptr && first->address <= last->address) {
      continue;
    }
    while (first->before != nullptr && price_of(*first->before, cost).cost < kNever) {
      first = first->before;
    }
    last = walk_run(first, needed, cost, best, all);
  }
  return best ? std::optional(tags_of(best->first, best->last)) : std::nullopt;
}

std::vector<void*> CachingManagedAllocator::min_cost_segments(std::size_t bytes, int device,
                                                              const BlockCost& cost) const {
  const State& state = *state_;
  state.check_device(device);
  const std::lock_guard lock(state.mutex);
  std::optional<Window> none;
  return tags_of(cheapest_cover(
      candidates_of(state.heap.segments(), Location::device(device), kLargestRequest, cost, none), bytes));
}

std::optional<std::vector<void*>> CachingManagedAllocator::first_fit_range(std::size_t bytes, int device,
                                                                           const BlockCost& cost) const {
  const State& state = *state_;
  state.check_device(device);
  check_bytes_of_run(bytes);
  const std::lock_guard lock(state.mutex);
  const Location home = Location::device(device);
  const std::size_t needed = state.bytes_for(bytes, home);
  for (const auto& [address, segment] : state.heap.segments()) {
    const Block* first = nullptr; // start of the current range of evictable blocks
    std::size_t found = 0;
    for (const Block* block = segment.home == home ? segment.first : nullptr; block != nullptr; block = block->after) {
      if (price_of(*block, cost).cost == kNever) {
        first = nullptr;
        found = 0;
        continue;
      }
      first = first == nullptr ? block : first;
      found += block->bytes;
      if (found >= needed) {
        return tags_of(first, block);
      }
    }
  }
  return std::nullopt;
}

} // namespace torch_uvm
