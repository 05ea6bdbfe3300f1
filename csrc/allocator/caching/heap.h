// Segments and the blocks that tile them: split, merge, find. Calls no runtime: the allocator decides which work must
// complete before a block is reused.
//
// Invariants (check.cpp walks them):
// - the blocks of a segment tile it, in address order; `used` counts those that are not free,
// - no two free neighbours share both a free list and the event they wait for, because they would have been merged,
// - a block is in the free index of its list and its segment's size class if and only if it is free.
//
// Not thread-safe; guarded by the allocator's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "allocator/caching/block.h"
#include "allocator/caching/pool_statistics.h"

namespace torch_uvm {

class Heap {
 public:
  using Segments = std::map<std::uintptr_t, Segment>; ///< by address

  explicit Heap(PoolStatistics& pool_statistics) : pool_statistics_(pool_statistics) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// The free list of a home and stream. Created on first use and never destroyed. \throws std::bad_alloc
  FreeList& free_list(Location home, Stream stream) {
    if (last_free_list_ != nullptr && last_free_list_->home == home && last_free_list_->stream == stream) {
      return *last_free_list_;
    }
    return look_up_free_list(home, stream);
  }

  /// The best fit among the free lists of a home other than `except`. `best` chooses within one.
  template <typename Best>
  Block* best_of_home(Location home, const FreeList* except, Best best) const {
    Block* found = nullptr;
    for (auto free_list = free_lists_.lower_bound({home, Stream{}});
         free_list != free_lists_.end() && free_list->first.first == home; ++free_list) {
      Block* const block = &free_list->second == except ? nullptr : best(free_list->second);
      if (block != nullptr && (found == nullptr || smaller(block, found))) {
        found = block;
      }
    }
    return found;
  }

  /// Bytes of the largest block in the free lists of a home.
  std::size_t largest_free(Location home) const noexcept;

  /// Takes the first `bytes` of a free block; the remainder stays filed. The result is reserved and keeps its free
  /// list.
  /// \throws std::bad_alloc, and nothing has changed
  Block* split(Block* free, std::size_t bytes);
  /// Like split, but starts at the first aligned address, or at the last. The piece before it stays filed as well.
  Block* split_aligned(Block* free, std::size_t bytes, std::size_t alignment, bool at_end);

  /// Files a block under its free list and merges it with free neighbours of the same list and event.
  void release(Block* block) noexcept;

  /// Contiguous free blocks, of any free lists, that together hold a request.
  struct Run {
    Block* first = nullptr;
    Block* last = nullptr;
    std::size_t bytes = 0; ///< total
  };
  /// The smallest run of at least `bytes`, optionally among the segments of one home.
  std::optional<Run> best_run(std::size_t bytes, std::optional<Location> segment_home) const;
  /// The run of at least `bytes` at the lowest address among the segments of one home: several blocks only where none
  /// is large enough alone.
  std::optional<Run> first_run(std::size_t bytes, Location segment_home) const;
  /// Merges a run and takes its first `bytes`; the remainder stays filed. The result is reserved and has the free list
  /// of the first block. \throws std::bad_alloc, and nothing has changed
  Block* split_range(const Run& run, std::size_t bytes);

  /// The allocations that a new segment needs, made before the source is called, so that add_segment cannot fail.
  class Slot {
    friend class Heap;
    Segments::node_type node_;
    Block* block_ = nullptr;
    BlockPool* pool_ = nullptr;

   public:
    Slot() = default;
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
    ~Slot() {
      if (block_ != nullptr) {
        pool_->give(block_);
      }
    }
  };
  /// \throws std::bad_alloc. Destroy the slot under the allocator's mutex.
  void prepare(Slot& slot);
  /// Adds a segment that consists of one free block.
  Block* add_segment(Slot& slot, void* ptr, std::size_t bytes, Location home, SizeClass kind,
                     FreeList& free_list) noexcept;
  /// Removes a segment with no block in use. \return the next segment
  Segments::iterator remove_segment(Segments::iterator segment) noexcept;

  /// Advances whenever a block is filed: a block filed by now has a tick of at most this.
  std::uint64_t clock() const {
    return clock_;
  }

  /// The block at an address, free or not; nullptr if no segment contains it.
  Block* find(std::uintptr_t address) const noexcept;

  Segments& segments() {
    return segments_;
  }
  const Segments& segments() const {
    return segments_;
  }
  const auto& free_lists() const {
    return free_lists_;
  }

 private:
  static bool smaller(const Block* left, const Block* right) {
    return left->bytes != right->bytes ? left->bytes < right->bytes : left->address < right->address;
  }
  static FreeIndex& index_of(Block* block) {
    return block->free_list->free[static_cast<std::size_t>(block->segment->size_class)];
  }
  static PoolKind pool_of(const Block* block) {
    return pool_kind(block->segment->size_class);
  }
  /// Calls `tell` for each minimal window of free neighbours that holds the request. Finds them in the indexes: most
  /// blocks are allocated.
  template <typename Tell>
  void each_run(std::size_t bytes, std::optional<Location> segment_home, Tell tell) const;
  FreeList& look_up_free_list(Location home, Stream stream);
  /// Updates the count of free pieces in partly used segments: every free piece of the segment starts (+1) or stops
  /// (-1) being counted.
  void count_pieces(const Segment& segment, int sign) noexcept;

  PoolStatistics& pool_statistics_;
  std::map<std::pair<Location, Stream>, FreeList> free_lists_; // never erased: blocks point at them
  FreeList* last_free_list_ = nullptr;
  Segments segments_;
  BlockPool pool_;
  std::uint64_t clock_ = 0;
};

} // namespace torch_uvm
