// The report of free memory and the number of its pieces.
#include "allocator/caching/fragmentation.h"

#include "allocator/caching/pool_statistics.h"
#include "allocator_rig.h"
#include "runtime/testing/recording_runtime.h"

using namespace contract;

TEST(nothing_reserved_means_no_fragmentation) {
  const Fragmentation none = fragmentation({});
  CHECK_EQ(none.reserved, std::size_t{0});
  CHECK_EQ(none.share_outside_largest(), 0.0);
}

TEST(every_byte_of_the_segments_is_accounted_for) {
  Rig rig(std::make_unique<RecordingRuntime>(2), true, AllocatorOptions{});
  const Stream other = rig.stream();
  std::vector<Block*> blocks;
  for (int i = 0; i < 6; ++i) {
    blocks.push_back(rig.allocate(3 * MiB + 100));
  }
  Block* const small = rig.allocate(1000);
  Block* const apart = rig.allocate(200 * MiB);
  rig.allocator->free(blocks[1]);
  rig.allocator->free(blocks[3]);
  rig.allocator->free(apart);
  rig.allocator->record_stream(blocks[5], other);
  static_cast<RecordingRuntime&>(*rig.runtime).hold(other);
  rig.allocator->free(blocks[5]);
  const Fragmentation found = fragmentation(rig.allocator->snapshot());
  const Levels now = rig.allocator->levels(std::nullopt);
  CHECK_EQ(as_signed(found.reserved), now.reserved_bytes[0]);
  CHECK_EQ(as_signed(found.allocated), now.allocated_bytes[0]);
  CHECK_EQ(as_signed(found.requested), now.requested_bytes[0]);
  CHECK_EQ(as_signed(found.inactive_split), now.inactive_split_bytes[0]);
  CHECK_EQ(as_signed(found.allocated + found.pending), now.active_bytes[0]);
  CHECK_EQ(found.allocated + found.pending + found.free, found.reserved);
  CHECK_EQ(found.inactive_split + found.unused_segments, found.free);
  CHECK_EQ(found.unused_segments, 200 * MiB);
  CHECK_EQ(found.largest_free, 200 * MiB);
  CHECK_EQ(found.pending, block_bytes(3 * MiB + 100));
  // two free blocks, and the remainder of the segment for small requests
  CHECK_EQ(found.pieces[2].count, std::size_t{3});
  CHECK_EQ(found.pieces[5].count, std::size_t{1});
  std::size_t bytes = 0;
  for (const Fragmentation::Pieces& pieces : found.pieces) {
    bytes += pieces.bytes;
  }
  CHECK_EQ(bytes, found.free);
  const std::string table = fragmentation_table(found);
  CHECK(table.find("200.00 MiB  in 1 free piece\n") != std::string::npos);
  CHECK_EQ(rig.allocator->empty_cache(), 200 * MiB);
  for (const int i : {0, 2, 4}) {
    rig.allocator->free(blocks[static_cast<std::size_t>(i)]);
  }
  rig.allocator->free(small);
}

TEST(each_home_is_reported_separately) {
  Rig rig(std::make_unique<RecordingRuntime>(2), true, AllocatorOptions{});
  Block* const here = rig.allocate(4 * MiB);
  Block* const there = rig.allocator->allocate(4 * MiB, Location::device(1), Stream::default_of(1));
  rig.allocator->set_home(here, Location::host(), Stream::host());
  const auto of = [&](Location home) { return fragmentation(rig.allocator->snapshot(), home); };
  CHECK_EQ(of(kDevice).reserved, kSegmentMin); // segments made for the home
  CHECK_EQ(of(kDevice).allocated, std::size_t{0});
  CHECK_EQ(of(Location::host()).reserved, std::size_t{0});
  CHECK_EQ(of(Location::host()).allocated, 4 * MiB); // blocks that belong to the home
  CHECK_EQ(of(Location::device(1)).allocated, 4 * MiB);
  CHECK_EQ(of(Location::device(1)).free, kSegmentMin - 4 * MiB);
  rig.allocator->free(here);
  rig.allocator->free(there);
}

HARNESS_MAIN()
