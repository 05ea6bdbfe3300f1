#include "allocator/caching/heap.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace torch_uvm {

namespace {

/// Inserts `block` before `next` in the block list of a segment.
void link_before(Block* block, Block* next) {
  block->before = next->before;
  block->after = next;
  (next->before != nullptr ? next->before->after : next->segment->first) = block;
  next->before = block;
}

void unlink(Block* block) {
  (block->before != nullptr ? block->before->after : block->segment->first) = block->after;
  if (block->after != nullptr) {
    block->after->before = block->before;
  }
}

} // namespace

void BlockPool::grow() {
  constexpr std::size_t kSlab = 64;
  slabs_.reserve(slabs_.size() + 1);
  auto slab = std::make_unique<Block[]>(kSlab);
  for (std::size_t i = 0; i < kSlab; ++i) {
    slab[i].entry = FreeIndex::make_entry();
  }
  for (std::size_t i = kSlab; i-- > 0;) { // in reverse, so that the lowest address is taken first
    give(&slab[i]);
  }
  slabs_.push_back(std::move(slab));
}

FreeList& Heap::look_up_free_list(Location home, Stream stream) {
  const auto [found, fresh] = free_lists_.try_emplace({home, stream});
  if (fresh) {
    found->second.home = home;
    found->second.stream = stream;
  }
  last_free_list_ = &found->second;
  return found->second;
}

std::size_t Heap::largest_free(Location home) const noexcept {
  std::size_t largest = 0;
  for (auto free_list = free_lists_.lower_bound({home, Stream{}});
       free_list != free_lists_.end() && free_list->first.first == home; ++free_list) {
    for (const FreeIndex& index : free_list->second.free) {
      largest = std::max(largest, index.largest());
    }
  }
  return largest;
}

void Heap::count_pieces(const Segment& segment, int sign) noexcept {
  for (const Block* block = segment.first; block != nullptr; block = block->after) {
    if (block->state == BlockState::kFree) {
      pool_statistics_.split_changed(block->free_list->home, pool_of(block), sign, sign * as_signed(block->bytes));
    }
  }
}

Block* Heap::split(Block* free, std::size_t bytes) {
  Segment& segment = *free->segment;
  Block* taken = free;
  if (free->bytes == bytes) {
    index_of(free).erase(free);
    if (segment.used != 0) {
      pool_statistics_.split_changed(free->free_list->home, pool_of(free), -1, -as_signed(bytes));
    }
  } else {
    // The free block shrinks in place and stays filed: its position in the index is usually unchanged.
    taken = pool_.take();
    taken->address = free->address;
    taken->bytes = bytes;
    taken->segment = free->segment;
    taken->free_list = free->free_list;
    taken->ready = free->ready;
    taken->freed_at = free->freed_at;
    link_before(taken, free);
    free->address += bytes;
    free->bytes -= bytes;
    index_of(free).update(free);
    if (segment.used != 0) {
      pool_statistics_.split_changed(free->free_list->home, pool_of(free), 0, -as_signed(bytes));
    }
  }
  taken->state = BlockState::kReserved;
  if (segment.used++ == 0) {
    count_pieces(segment, 1);
  }
  return taken;
}

Block* Heap::split_aligned(Block* free, std::size_t bytes, std::size_t alignment, bool at_end) {
  const std::uintptr_t last = free->address + free->bytes - bytes;
  const std::size_t skipped =
      (at_end ? round_down(last, alignment) : round_up(free->address, alignment)) - free->address;
  if (skipped == 0) {
    return split(free, bytes);
  }
  Block* const front = split(free, skipped); // `free` is now the remainder
  try {
    Block* const taken = split(free, bytes);
    release(front);
    return taken;
  } catch (...) {
    release(front);
    throw;
  }
}

void Heap::release(Block* block) noexcept {
  Segment& segment = *block->segment;
  block->requested = 0;
  block->freed_at = std::exchange(block->idle, false) ? 0 : ++clock_;
  const auto alike = [block](const Block* other) {
    return other != nullptr && other->state == BlockState::kFree && other->free_list == block->free_list &&
           other->ready == block->ready;
  };
  Block* const before = alike(block->before) ? block->before : nullptr;
  Block* const after = alike(block->after) ? block->after : nullptr;
  if (--segment.used == 0) {
    segment.unused_since = clock_;
    count_pieces(segment, -1);
  } else {
    pool_statistics_.split_changed(block->free_list->home, pool_of(block), 1 - (before != nullptr) - (after != nullptr),
                                   as_signed(block->bytes));
  }
  if (before != nullptr) {
    before->bytes += block->bytes;
    before->freed_at = std::max(before->freed_at, block->freed_at);
    unlink(block);
    pool_.give(block);
    if (after != nullptr) {
      before->bytes += after->bytes;
      before->freed_at = std::max(before->freed_at, after->freed_at);
      index_of(after).erase(after);
      unlink(after);
      pool_.give(after);
    }
    index_of(before).update(before);
  } else if (after != nullptr) {
    after->address = block->address;
    after->bytes += block->bytes;
    after->freed_at = std::max(after->freed_at, block->freed_at);
    unlink(block);
    pool_.give(block);
    index_of(after).update(after);
  } else {
    block->state = BlockState::kFree;
    index_of(block).insert(block);
  }
}

template <typename Tell>
void Heap::each_run(std::size_t bytes, std::optional<Location> segment_home, Tell tell) const {
  const auto walk = [&](Block* block) {
    if ((block->before != nullptr && block->before->state == BlockState::kFree) ||
        (segment_home && block->segment->home != *segment_home)) {
      return; // its run begins before
    }
    for (Run window{block, block}; block != nullptr && block->state == BlockState::kFree; block = block->after) {
      window.last = block;
      window.bytes += block->bytes;
      while (window.bytes - window.first->bytes >= bytes) {
        window.bytes -= window.first->bytes;
        window.first = window.first->after;
      }
      if (window.bytes >= bytes) {
        tell(window);
      }
    }
  };
  for (const auto& [key, free_list] : free_lists_) {
    for (const FreeIndex& index : free_list.free) {
      index.each(walk);
    }
  }
}

std::optional<Heap::Run> Heap::best_run(std::size_t bytes, std::optional<Location> segment_home) const {
  std::optional<Run> best;
  each_run(bytes, segment_home, [&best](const Run& run) {
    if (!best || std::tie(run.bytes, run.first->address) < std::tie(best->bytes, best->first->address)) {
      best = run;
    }
  });
  return best;
}

std::optional<Heap::Run> Heap::first_run(std::size_t bytes, Location segment_home) const {
  Block* lowest = nullptr;
  for (const auto& [key, free_list] : free_lists_) {
    for (const SizeClass kind : {SizeClass::kSmall, SizeClass::kMedium, SizeClass::kLarge}) {
      Block* const block = free_list.free[static_cast<std::size_t>(kind)].lowest_fit(bytes);
      if (block != nullptr && block->segment->home == segment_home &&
          (lowest == nullptr || block->address < lowest->address)) {
        lowest = block;
      }
    }
  }
  if (lowest != nullptr) {
    return Run{lowest, lowest, lowest->bytes};
  }
  std::optional<Run> first;
  each_run(bytes, segment_home, [&](const Run& run) {
    if (!first || run.first->address < first->first->address) {
      first = run;
    }
  });
  return first;
}

Block* Heap::split_range(const Run& run, std::size_t bytes) {
  if (run.first == run.last) {
    return split(run.first, bytes);
  }
  Segment& segment = *run.first->segment;
  const bool counted = segment.used != 0;
  const auto take_out = [&](Block* block) {
    index_of(block).erase(block);
    if (counted) {
      pool_statistics_.split_changed(block->free_list->home, pool_of(block), -1, -as_signed(block->bytes));
    }
  };
  Block* const taken = run.first;
  take_out(taken);
  while (taken->after != run.last) {
    Block* const middle = taken->after;
    take_out(middle);
    taken->bytes += middle->bytes;
    unlink(middle);
    pool_.give(middle);
  }
  Block* const last = run.last;
  const std::size_t needed = bytes - taken->bytes; // at least 1, because the window is minimal
  if (last->bytes == needed) {
    take_out(last);
    unlink(last);
    pool_.give(last);
  } else {
    last->address += needed;
    last->bytes -= needed;
    index_of(last).update(last);
    if (counted) {
      pool_statistics_.split_changed(last->free_list->home, pool_of(last), 0, -as_signed(needed));
    }
  }
  taken->bytes = bytes;
  taken->state = BlockState::kReserved;
  if (segment.used++ == 0) {
    count_pieces(segment, 1);
  }
  return taken;
}

void Heap::prepare(Slot& slot) {
  Segments scratch;
  scratch.try_emplace(0);
  slot.node_ = scratch.extract(scratch.begin());
  slot.block_ = pool_.take();
  slot.pool_ = &pool_;
}

Block* Heap::add_segment(Slot& slot, void* ptr, std::size_t bytes, Location home, SizeClass kind,
                         FreeList& free_list) noexcept {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  slot.node_.key() = address;
  Segment& segment = segments_.insert(std::move(slot.node_)).position->second;
  Block* const block = std::exchange(slot.block_, nullptr);
  segment = Segment{};
  segment.address = address;
  segment.bytes = bytes;
  segment.home = home;
  segment.size_class = kind;
  segment.first = block;
  block->address = address;
  block->bytes = bytes;
  block->requested = 0;
  block->segment = &segment;
  block->before = block->after = nullptr;
  block->free_list = &free_list;
  block->state = BlockState::kFree;
  block->freed_at = ++clock_;
  index_of(block).insert(block);
  segment.unused_since = clock_;
  pool_statistics_.segments_changed(home, pool_kind(kind), as_signed(bytes));
  return block;
}

Heap::Segments::iterator Heap::remove_segment(Segments::iterator position) noexcept {
  Segment& segment = position->second;
  for (Block* block = segment.first; block != nullptr;) {
    Block* const next = block->after;
    index_of(block).erase(block);
    pool_.give(block);
    block = next;
  }
  pool_statistics_.segments_changed(segment.home, pool_kind(segment.size_class), -as_signed(segment.bytes));
  return segments_.erase(position);
}

Block* Heap::find(std::uintptr_t address) const noexcept {
  auto position = segments_.upper_bound(address);
  if (position == segments_.begin()) {
    return nullptr;
  }
  const Segment& segment = (--position)->second;
  if (address - segment.address >= segment.bytes) {
    return nullptr;
  }
  Block* block = segment.first;
  while (address - block->address >= block->bytes) {
    block = block->after;
  }
  return block;
}

} // namespace torch_uvm
