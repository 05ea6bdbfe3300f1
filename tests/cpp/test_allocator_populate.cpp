// A new segment is populated by one prefetch if its home is a device and the segment fits there.
#include "recorded_rig.h"

using namespace contract;

TEST(a_fresh_segment_is_populated_by_one_prefetch) {
  Recorded rig;
  Block* const block = rig.allocate(3 * MiB, rig.a);
  rig.expect_calls({"allocate_managed", "prefetch"});
  const RecordedCall prefetch = rig.calls.calls().back();
  CHECK_EQ(prefetch.bytes, kMediumSegment);
  CHECK(prefetch.location == kDevice);
  CHECK(prefetch.stream == rig.a);
  rig.calls.clear_calls();
  rig.allocator->free(block);
  rig.allocator->free(rig.allocate(3 * MiB, rig.a));
  Block* const of_host = rig.allocator->allocate(3 * MiB, Location::host(), Stream::host());
  rig.expect_calls({"allocate_managed"}); // the host populates pages by accessing them
  rig.allocator->free(of_host);
  rig.calls.clear_calls();
  Block* const no_stream = rig.allocator->allocate(12 * MiB, kDevice, Stream::host());
  rig.expect_calls({"allocate_managed", "prefetch"});
  CHECK(rig.calls.calls().back().stream == kStream);
  rig.allocator->free(no_stream);
}

TEST(populating_can_be_turned_off) {
  Recorded rig(AllocatorOptions{.populate = false});
  rig.allocator->free(rig.allocate(3 * MiB, rig.a));
  CHECK_EQ(rig.calls.count("prefetch"), std::size_t{0});
}

TEST(a_failed_prefetch_is_ignored) {
  Recorded rig;
  rig.calls.fail("prefetch", 1);
  Block* const block = rig.allocate(3 * MiB, rig.a);
  CHECK(block != nullptr);
  CHECK_EQ(rig.allocator->statistics().num_populate_failures, 1);
  rig.check();
  rig.allocator->free(block);
}

TEST(a_segment_larger_than_its_device_is_not_prefetched) {
  Recorded rig;
  const std::size_t all = rig.runtime->device_properties(0).total_memory;
  rig.allocator->free(rig.allocate(all, rig.a));
  CHECK_EQ(rig.calls.count("prefetch"), std::size_t{1});
  rig.allocator->free(rig.allocate(all + 1, rig.a));
  CHECK_EQ(rig.calls.count("prefetch"), std::size_t{1});
  CHECK_EQ(rig.allocator->statistics().num_populate_failures, 0);
}

TEST(device_memory_is_not_prefetched) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  rig.allocator->free(rig.allocate(3 * MiB));
  CHECK_EQ(static_cast<RecordingRuntime&>(*rig.runtime).count("prefetch"), std::size_t{0});
}

HARNESS_MAIN()
