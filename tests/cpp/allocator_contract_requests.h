// Contract cases about requests: sizes, alignment, homes and streams.
#pragma once

#include <algorithm>
#include <vector>

#include "allocator/size_classes.h"
#include "allocator_rig.h"

namespace contract {

inline void zero_bytes_need_no_memory(const MakeRig& make) {
  Rig rig = make();
  Block* const block = rig.allocate(0);
  CHECK(block == nullptr);
  CHECK(rig.allocator->data(block) == nullptr);
  rig.allocator->free(block);
  CHECK_EQ(rig.reserved(), 0);
}

inline void blocks_are_aligned_and_apart(const MakeRig& make) {
  Rig rig = make();
  std::vector<Block*> blocks;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{511}, std::size_t{512}, std::size_t{513}, 1 * MiB,
                                  1 * MiB + 1, 3 * MiB + 7, 10 * MiB - 1, 10 * MiB, 10 * MiB + 1, 32 * MiB, 33 * MiB}) {
    Block* const block = rig.allocate(bytes);
    CHECK_EQ(rig.address(block) % kBlockAlignment, std::size_t{0});
    CHECK_EQ(rig.allocator->requested_bytes(block), bytes);
    CHECK(rig.allocator->bytes(block) >= bytes);
    if (bytes >= kWholePagesRequest) { // begins at a large page and fills whole large pages
      CHECK_EQ(rig.address(block) % kLargeGranularity, std::size_t{0});
      CHECK_EQ(rig.allocator->bytes(block) % kLargeGranularity, std::size_t{0});
    }
    blocks.push_back(block);
    rig.check();
  }
  std::ranges::sort(blocks, {}, [&](const Block* block) { return rig.address(block); });
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    CHECK(rig.address(blocks[i - 1]) + rig.allocator->bytes(blocks[i - 1]) <= rig.address(blocks[i]));
  }
  for (Block* const block : blocks) {
    rig.allocator->free(block);
    rig.check();
  }
}

inline void unknown_homes_and_streams_are_refused(const MakeRig& make) {
  Rig rig = make();
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, Location::device(2), kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, Location{-2}, kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, kDevice, Stream::default_of(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, kDevice, Stream{-2, nullptr}));
  CHECK_THROWS(InvalidArgument, rig.allocator->statistics(Location::device(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->reset_peak_statistics(Location::device(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->reset_accumulated_statistics(Location::device(2)));
  Block* const block = rig.allocate(100);
  CHECK_THROWS(InvalidArgument, rig.allocator->record_stream(block, Stream::default_of(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->set_home(block, Location::device(2), kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->record_stream(nullptr, kStream));
  CHECK(rig.allocator->home(block) == kDevice);
  rig.allocator->free(block);
  rig.check();
}

inline void the_host_is_a_home_of_managed_memory_only(const MakeRig& make) {
  Rig rig = make();
  if (!rig.managed) {
    CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, Location::host(), Stream::host()));
    return;
  }
  Block* const block = rig.allocator->allocate(5000, Location::host(), Stream::host());
  CHECK(rig.allocator->home(block).is_host());
  CHECK(rig.allocator->stream(block).is_host());
  CHECK_EQ(rig.allocator->statistics(Location::host()).allocation[0].current, 1);
  CHECK_EQ(rig.allocator->statistics(kDevice).reserved_bytes[0].current, 0);
  rig.allocator->free(block);
  rig.check();
}

} // namespace contract
