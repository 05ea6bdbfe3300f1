// Segments and the blocks that tile them: split, merge, find. It calls no runtime; which work has to be
// over before a block may be reused is the allocator's concern.
//
// Invariants (check.cpp walks them):
// - the blocks of a segment tile it, in address order; `used` counts those that are not free,
// - no two free neighbours share a lane and what they wait for: they would have been merged,
// - a block is filed, in its lane under its segment's size class, exactly while it is free.
//
// Not thread-safe: the allocator's mutex guards it.
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

  /// The lane of a home and stream, made at its first use and kept. \throws std::bad_alloc
  Lane& lane(Location home, Stream stream) {
    if (last_lane_ != nullptr && last_lane_->home == home && last_lane_->stream == stream) {
      return *last_lane_;
    }
    return look_up_lane(home, stream);
  }

  /// The best fit among the lanes of a home, `except` left out; `best` chooses within a lane.
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

  /// Takes the first `bytes` of a free block; the rest stays filed where it is. The result is reserved
  /// and still of the old lane.
  /// \throws std::bad_alloc, and nothing has changed
  Block* carve(Block* free, std::size_t bytes);
  /// As carve, from the first aligned address on; what is before it stays filed, too.
  Block* carve_aligned(Block* free, std::size_t bytes, std::size_t alignment);

  /// Files a block that is not free under its lane, merged with the neighbours that are filed alike.
  void release(Block* block) noexcept;

  /// Free neighbours of whatever lanes that together hold a request.
  struct Run {
    Block* first = nullptr;
    Block* last = nullptr;
    std::size_t bytes = 0; ///< of all of them
  };
  /// The smallest run of at least `bytes`; of segments of one home, if one is given.
  std::optional<Run> best_run(std::size_t bytes, std::optional<Location> segment_home) const;
  /// The run of at least `bytes` that has the lowest address.
  std::optional<Run> first_run(std::size_t bytes, std::optional<Location> segment_home) const;
  /// Merges a run and takes its first `bytes`; what is left of the last block stays filed. The result is
  /// reserved, of the lane of the first. \throws std::bad_alloc, and nothing has changed
  Block* carve_run(const Run& run, std::size_t bytes);

  /// What a new segment needs, made before the source is asked: adding it cannot fail then.
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
  /// \throws std::bad_alloc. The slot is to be destroyed under the allocator's mutex.
  void prepare(Slot& slot);
  /// A segment that is one free block.
  Block* add_segment(Slot& slot, void* ptr, std::size_t bytes, Location home, SizeClass kind, Lane& lane) noexcept;
  /// Takes a segment with no block in use out. \return the next one
  Segments::iterator remove_segment(Segments::iterator segment) noexcept;

  /// Segments of a home with no block in use, those unused for longest first.
  struct Unused {
    Segment* oldest = nullptr;
    Segment* newest = nullptr;
    std::size_t bytes = 0;
  };
  const Unused& unused(Location home) const {
    return unused_[static_cast<std::size_t>(home.index + 1)];
  }
  /// Ticks when a block is filed: what is filed by now was filed at or before it.
  std::uint64_t clock() const {
    return clock_;
  }

  /// The block at an address, free or not; nullptr: outside of all segments.
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
  /// Every free piece of the segment begins (+1) or ceases (-1) to be one of a segment partly in use.
  void count_pieces(const Segment& segment, int sign) noexcept;

  Ledger& ledger_;
  std::map<std::pair<Location, Stream>, Lane> lanes_; // never erased: blocks point at them
  Lane* last_lane_ = nullptr;
  Segments segments_;
  BlockPool pool_;
  std::vector<Unused> unused_; ///< of the host, of the devices
  std::uint64_t clock_ = 0;
};

} // namespace torch_uvm
