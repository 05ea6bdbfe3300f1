// Segments and the blocks that tile them: split, merge, find. Calls no runtime: the allocator decides which work must
// complete before a block is reused.
//
// Invariants (check.cpp walks them):
// - the blocks of a segment tile it, in address order; `used` counts those that are not free,
// - no two free neighbours share both a lane and the event they wait for, because they would have been merged,
// - a block is in the free index of its lane and its segment's size class if and only if it is free.
//
// Not thread-safe; guarded by the allocator's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "allocator/caching/block.h"
#include "allocator/caching/ledger.h"

namespace torch_uvm {

class Heap {
 public:
  using Segments = std::map<std::uintptr_t, Segment>; ///< by address

  Heap(Ledger& ledger, int devices) : ledger_(ledger), unused_(static_cast<std::size_t>(devices) + 1) {}
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  /// The lane of a home and stream. Created on first use and never destroyed. \throws std::bad_alloc
  Lane& lane(Location home, Stream stream) {
    if (last_lane_ != nullptr && last_lane_->home == home && last_lane_->stream == stream) {
      return *last_lane_;
    }
    return look_up_lane(home, stream);
  }

  /// The best fit among the lanes of a home other than `except`. `best` chooses within a lane.
  template <typename Best>
  Block* best_of_home(Location home, const Lane* except, Best best) const {
    Block* found = nullptr;
    for (auto lane = lanes_.lower_bound({home, Stream{}}); lane != lanes_.end() && lane->first.first == home; ++lane) {
      Block* const block = &lane->second == except ? nullptr : best(lane->second);
      if (block != nullptr && (found == nullptr || smaller(block, found))) {
        found = block;
      }
    }
    return found;
  }

  /// Takes the first `bytes` of a free block; the remainder stays filed. The result is reserved and keeps its lane.
  /// \throws std::bad_alloc, and nothing has changed
  Block* carve(Block* free, std::size_t bytes);
  /// Like carve, but starts at the first aligned address. The piece before it stays filed as well.
  Block* carve_aligned(Block* free, std::size_t bytes, std::size_t alignment);

  /// Files a block under its lane and merges it with free neighbours of the same lane and event.
  void release(Block* block) noexcept;

  /// Contiguous free blocks, of any lanes, that together hold a request.
  struct Run {
    Block* first = nullptr;
    Block* last = nullptr;
    std::size_t bytes = 0; ///< total
  };
  /// The smallest run of at least `bytes`, optionally among the segments of one home.
  std::optional<Run> best_run(std::size_t bytes, std::optional<Location> segment_home) const;
  /// The run of at least `bytes` at the lowest address.
  std::optional<Run> first_run(std::size_t bytes, std::optional<Location> segment_home) const;
  /// Merges a run and takes its first `bytes`; the remainder stays filed. The result is reserved and has the lane of
  /// the first block. \throws std::bad_alloc, and nothing has changed
  Block* carve_run(const Run& run, std::size_t bytes);

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
  Block* add_segment(Slot& slot, void* ptr, std::size_t bytes, Location home, SizeClass kind, Lane& lane) noexcept;
  /// Removes a segment with no block in use. \return the next segment
  Segments::iterator remove_segment(Segments::iterator segment) noexcept;

  /// The unused segments of a home (no block in use), those unused for longest first.
  struct Unused {
    Segment* oldest = nullptr;
    Segment* newest = nullptr;
    std::size_t bytes = 0;
  };
  const Unused& unused(Location home) const {
    return unused_[static_cast<std::size_t>(home.index + 1)];
  }
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
  const auto& lanes() const {
    return lanes_;
  }

 private:
  static bool smaller(const Block* left, const Block* right) {
    return left->bytes != right->bytes ? left->bytes < right->bytes : left->address < right->address;
  }
  static FreeIndex& index_of(Block* block) {
    return block->lane->free[static_cast<std::size_t>(block->segment->size_class)];
  }
  static PoolKind pool_of(const Block* block) {
    return pool_kind(block->segment->size_class);
  }
  Unused& unused_of(const Segment& segment) {
    return unused_[static_cast<std::size_t>(segment.home.index + 1)];
  }
  void append_unused(Segment& segment) noexcept;
  void remove_unused(Segment& segment) noexcept;
  Lane& look_up_lane(Location home, Stream stream);
  /// Updates the count of free pieces in partly used segments: every free piece of the segment starts (+1) or stops
  /// (-1) being counted.
  void count_pieces(const Segment& segment, int sign) noexcept;

  Ledger& ledger_;
  std::map<std::pair<Location, Stream>, Lane> lanes_; // never erased: blocks point at them
  Lane* last_lane_ = nullptr;
  Segments segments_;
  BlockPool pool_;
  std::vector<Unused> unused_; ///< index 0: the host; then the devices
  std::uint64_t clock_ = 0;
};

} // namespace torch_uvm
