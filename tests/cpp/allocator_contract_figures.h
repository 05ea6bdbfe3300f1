// Contract cases about reported data: blocks by address, statistics, snapshots.
#pragma once

#include <optional>

#include "allocator/size_classes.h"
#include "allocator_rig.h"

namespace contract {

inline void addresses_find_their_block(const MakeRig& make) {
  Rig rig = make();
  Block* const one = rig.allocate(1000);
  Block* const two = rig.allocate(2000);
  for (Block* const block : {one, two}) {
    const auto* const data = static_cast<const char*>(rig.allocator->data(block));
    CHECK(rig.allocator->find(data) == block);
    CHECK(rig.allocator->find(data + rig.allocator->bytes(block) - 1) == block);
    CHECK(rig.allocator->find(data + rig.allocator->bytes(block)) != block);
  }
  int elsewhere = 0;
  CHECK(rig.allocator->find(&elsewhere) == nullptr);
  CHECK(rig.allocator->find(nullptr) == nullptr);
  const void* const was = rig.allocator->data(one);
  rig.allocator->free(one);
  CHECK(rig.allocator->find(was) == nullptr);
  rig.allocator->free(two);
}

inline void statistics_follow_what_happens(const MakeRig& make) {
  Rig rig = make();
  Block* const small = rig.allocate(1000);
  Block* const large = rig.allocate(3 * MiB);
  const Statistics now = rig.allocator->statistics();
  CHECK_EQ(now.allocation[0].current, 2);
  CHECK_EQ(now.allocation[1].current, 1);
  CHECK_EQ(now.allocation[2].current, 1);
  CHECK_EQ(now.requested_bytes[0].current, static_cast<std::int64_t>(1000 + 3 * MiB));
  CHECK_EQ(now.allocated_bytes[1].current, 1024);
  CHECK_EQ(now.reserved_bytes[0].current, static_cast<std::int64_t>(kSmallSegment + kMediumSegment));
  CHECK_EQ(now.segment[0].current, 2);
  CHECK_EQ(now.inactive_split[0].current, 2);
  CHECK_EQ(now.inactive_split_bytes[1].current, static_cast<std::int64_t>(kSmallSegment - 1024));
  CHECK_EQ(now.active_bytes[0].current, now.allocated_bytes[0].current);
  rig.allocator->free(small);
  rig.allocator->free(large);
  const Statistics after = rig.allocator->statistics();
  CHECK_EQ(after.allocation[0].current, 0);
  CHECK_EQ(after.allocation[0].peak, 2);
  CHECK_EQ(after.allocation[0].allocated, 2);
  CHECK_EQ(after.allocation[0].freed, 2);
  CHECK_EQ(after.active[0].freed, 2);
  CHECK_EQ(after.inactive_split[0].current, 0);
  CHECK_EQ(after.num_ooms, 0);
  CHECK_EQ(after.num_device_alloc, 2);
  CHECK_EQ(after.num_device_free, 0);
  rig.allocator->empty_cache();
  CHECK_EQ(rig.allocator->statistics().num_device_free, 2);
  CHECK_EQ(rig.reserved(), 0);
}

inline void the_total_peak_is_the_peak_of_the_sum(const MakeRig& make) {
  Rig rig = make();
  const auto peak = [&](std::optional<Location> home) {
    return rig.allocator->statistics(home).allocated_bytes[0].peak;
  };
  constexpr auto kBytes = static_cast<std::int64_t>(12 * MiB);
  rig.allocator->free(rig.allocate(12 * MiB, Stream::default_of(0)));
  rig.allocator->free(rig.allocate(12 * MiB, Stream::default_of(1)));
  CHECK_EQ(peak(Location::device(0)), kBytes);
  CHECK_EQ(peak(Location::device(1)), kBytes);
  CHECK_EQ(peak(std::nullopt), kBytes); // the two peaks were not reached at the same time
  Block* const one = rig.allocate(12 * MiB, Stream::default_of(0));
  Block* const two = rig.allocate(12 * MiB, Stream::default_of(1));
  CHECK_EQ(peak(std::nullopt), 2 * kBytes);
  rig.allocator->free(one);
  rig.allocator->free(two);
}

inline void statistics_reset_by_home(const MakeRig& make) {
  Rig rig = make();
  Block* const kept = rig.allocate(1024);
  rig.allocator->free(rig.allocate(4096));
  rig.allocator->reset_peak_statistics(kDevice);
  rig.allocator->reset_accumulated_statistics(kDevice);
  const Statistics here = rig.allocator->statistics(kDevice);
  CHECK_EQ(here.allocated_bytes[0].current, 1024);
  CHECK_EQ(here.allocated_bytes[0].peak, 1024);
  CHECK_EQ(here.allocated_bytes[0].allocated, 0);
  CHECK_EQ(here.active_bytes[0].peak, 1024);
  CHECK_EQ(here.active_bytes[0].freed, 0);
  CHECK_EQ(here.num_device_alloc, 0);
  const Statistics total = rig.allocator->statistics(); // not reset together with the home's
  CHECK_EQ(total.allocated_bytes[0].peak, 1024 + 4096);
  CHECK_EQ(total.allocated_bytes[0].allocated, 1024 + 4096);
  CHECK_EQ(total.num_device_alloc, 1);
  rig.allocator->free(kept);
  CHECK_EQ(rig.allocator->statistics(kDevice).allocated_bytes[0].freed, 1024);
  rig.check();
}

inline void the_snapshot_shows_every_byte(const MakeRig& make) {
  Rig rig = make();
  Block* const one = rig.allocate(1000);
  Block* const two = rig.allocate(12 * MiB);
  const auto snapshot = rig.allocator->snapshot();
  CHECK_EQ(snapshot.size(), std::size_t{2});
  std::size_t allocated = 0;
  for (const SegmentInfo& segment : snapshot) {
    std::uintptr_t next = segment.address;
    for (const BlockInfo& block : segment.blocks) {
      CHECK_EQ(block.address, next);
      next += block.bytes;
    }
    CHECK_EQ(next, segment.address + segment.bytes);
    CHECK(segment.home == kDevice);
    allocated += segment.allocated_bytes;
  }
  CHECK_EQ(allocated, rig.allocator->bytes(one) + rig.allocator->bytes(two));
  rig.allocator->free(one);
  rig.allocator->free(two);
}

} // namespace contract
