// Contract cases about the reuse of freed blocks: best fit, coalescing, streams, homes, splitting.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "allocator/size_classes.h"
#include "allocator_rig.h"

namespace contract {

inline void a_freed_block_is_reused(const MakeRig& make) {
  Rig rig = make();
  for (const std::size_t bytes : {std::size_t{700}, 3 * MiB, 40 * MiB}) {
    Block* const first = rig.allocate(bytes);
    const std::uintptr_t address = rig.address(first);
    rig.allocator->free(first);
    const std::int64_t reserved = rig.reserved();
    Block* const second = rig.allocate(bytes);
    CHECK_EQ(rig.address(second), address);
    CHECK_EQ(rig.reserved(), reserved);
    rig.allocator->free(second);
    rig.check();
  }
}

inline void the_best_fit_is_taken_lowest_address_first(const MakeRig& make) {
  Rig rig = make();
  // Free blocks of 8, 4, 4 and 6 units, separated by blocks in use.
  constexpr std::size_t kUnit = 4 * KiB;
  std::vector<Block*> holes, walls;
  for (const std::size_t units : {8, 4, 4, 6}) {
    holes.push_back(rig.allocate(units * kUnit));
    walls.push_back(rig.allocate(kUnit));
  }
  std::vector<std::uintptr_t> at;
  for (Block* const hole : holes) {
    at.push_back(rig.address(hole));
  }
  for (const std::size_t i : {2, 0, 3, 1}) { // the result does not depend on the order of the frees
    rig.allocator->free(holes[i]);
  }
  Block* const four = rig.allocate(4 * kUnit);
  CHECK_EQ(rig.address(four), std::min(at[1], at[2]));
  Block* const five = rig.allocate(5 * kUnit);
  CHECK_EQ(rig.address(five), at[3]);
  Block* const seven = rig.allocate(7 * kUnit);
  CHECK_EQ(rig.address(seven), at[0]);
  rig.check();
  for (Block* const block : {four, five, seven}) {
    rig.allocator->free(block);
  }
  for (Block* const wall : walls) {
    rig.allocator->free(wall);
  }
  rig.check();
}

inline void neighbours_coalesce_in_any_order(const MakeRig& make) {
  Rig rig = make();
  std::array<std::size_t, 4> order{0, 1, 2, 3};
  do {
    std::array<Block*, 4> blocks{};
    for (Block*& block : blocks) {
      block = rig.allocate(kSmallSegment / 4);
    }
    CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kSmallSegment));
    for (const std::size_t i : order) {
      rig.allocator->free(blocks[i]);
      rig.check();
    }
    const auto snapshot = rig.allocator->snapshot();
    CHECK_EQ(snapshot.size(), std::size_t{1});
    CHECK_EQ(snapshot[0].blocks.size(), std::size_t{1});
    CHECK_EQ(snapshot[0].blocks[0].bytes, kSmallSegment);
  } while (std::ranges::next_permutation(order).found);
}

inline void homes_do_not_share_blocks(const MakeRig& make) {
  Rig rig = make();
  rig.allocator->free(rig.allocate(1000));
  Block* const other = rig.allocate(1000, Stream::default_of(1));
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(2 * kSmallSegment));
  CHECK_EQ(rig.allocator->statistics(Location::device(1)).reserved_bytes[1].current,
           static_cast<std::int64_t>(kSmallSegment));
  rig.allocator->free(other);
  rig.check();
}

inline void another_stream_takes_a_block_before_a_new_segment_is_made(const MakeRig& make) {
  Rig rig = make();
  const Stream other = rig.stream();
  Block* const first = rig.allocate(12 * MiB);
  const std::uintptr_t address = rig.address(first);
  rig.allocator->free(first);
  Block* const second = rig.allocate(12 * MiB, other);
  CHECK_EQ(rig.address(second), address);
  CHECK(rig.allocator->stream(second) == other);
  CHECK_EQ(rig.allocator->statistics().num_device_alloc, 1);
  rig.allocator->free(second);
  rig.check();
}

inline void blocks_with_recorded_streams_are_reused(const MakeRig& make) {
  Rig rig = make();
  const Stream other = rig.stream();
  Block* const block = rig.allocate(12 * MiB);
  rig.allocator->record_stream(block, other);
  rig.allocator->record_stream(block, other);
  rig.allocator->record_stream(block, Stream::host());
  rig.allocator->record_stream(block, kStream);
  rig.allocator->free(block);
  rig.check();
  CHECK_EQ(rig.allocator->statistics().allocation[0].current, 0);
  CHECK_EQ(rig.allocator->empty_cache(), 12 * MiB);
  CHECK_EQ(rig.reserved(), 0);
  rig.check();
}

inline void a_moved_block_belongs_to_its_new_home(const MakeRig& make) {
  Rig rig = make();
  Block* const block = rig.allocate(12 * MiB);
  if (!rig.managed) {
    CHECK_THROWS(InvalidArgument, rig.allocator->set_home(block, Location::device(1), Stream::default_of(1)));
    rig.allocator->free(block);
    return;
  }
  const std::uintptr_t address = rig.address(block);
  const Location there = Location::device(1);
  rig.allocator->set_home(block, there, Stream::default_of(1));
  rig.check();
  CHECK(rig.allocator->home(block) == there);
  CHECK_EQ(rig.allocator->statistics(there).allocated_bytes[0].current, static_cast<std::int64_t>(12 * MiB));
  CHECK_EQ(rig.allocator->statistics(kDevice).allocated_bytes[0].current, 0);
  CHECK_EQ(rig.allocator->statistics().allocated_bytes[0].peak, static_cast<std::int64_t>(12 * MiB));
  rig.allocator->free(block);
  rig.runtime->synchronize_device(0);
  Block* const reused = rig.allocate(12 * MiB, Stream::default_of(1));
  CHECK_EQ(rig.address(reused), address);
  CHECK_EQ(rig.allocator->statistics().num_device_alloc, 1);
  rig.allocator->free(reused);
  rig.check();
}

} // namespace contract
