// Order between streams that use a block in turn: the runtime calls of a reuse, and the waits of the host.
#include <utility>
#include <vector>

#include "recorded_rig.h"

using namespace contract;

TEST(reuse_on_the_same_stream_makes_no_call) {
  Recorded rig;
  rig.cache(1000, rig.a);
  rig.calls.hold(rig.a);
  for (int i = 0; i < 10; ++i) {
    rig.allocator->free(rig.allocate(1000, rig.a));
  }
  rig.expect_calls({});
  rig.check();
}

TEST(another_stream_waits_for_one_event) {
  Recorded rig;
  const std::uintptr_t at = rig.cache(12 * MiB, rig.a);
  rig.calls.hold(rig.a);
  // Queued work, so that the stream is not idle.
  Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, rig.a);
  rig.calls.clear_calls();
  Block* const block = rig.allocate(12 * MiB, rig.b);
  CHECK_EQ(rig.address(block), at);
  rig.expect_calls({"query_stream", "create_event", "record_event", "wait_event"});
  CHECK(rig.calls.calls()[2].stream == rig.a);
  CHECK(rig.calls.calls()[3].stream == rig.b);
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 1);
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 0);
  rig.allocator->free(block);
  rig.runtime->destroy_event(work);
}

TEST(an_idle_stream_needs_no_event) {
  Recorded rig;
  const std::uintptr_t at = rig.cache(12 * MiB, rig.a);
  Block* const block = rig.allocate(12 * MiB, rig.b);
  CHECK_EQ(rig.address(block), at);
  rig.expect_calls({"query_stream"});
  rig.allocator->free(block);
}

TEST(a_stream_prefers_its_own_blocks) {
  Recorded rig;
  Block* const of_a = rig.allocate(12 * MiB, rig.a);
  Block* const of_b = rig.allocate(14 * MiB, rig.b);
  const std::uintptr_t at = rig.address(of_b);
  rig.allocator->free(of_a);
  rig.allocator->free(of_b);
  rig.calls.clear_calls();
  Block* const block = rig.allocate(12 * MiB, rig.b); // the block of `a` fits better, but costs a query
  CHECK_EQ(rig.address(block), at);
  rig.expect_calls({});
  rig.allocator->free(block);
}

TEST(a_piece_taken_by_another_stream_leaves_the_rest_with_the_first) {
  Recorded rig;
  const std::uintptr_t at = rig.cache(64 * MiB, rig.a);
  Block* const piece = rig.allocate(12 * MiB, rig.b);
  CHECK_EQ(rig.address(piece), at);
  rig.calls.clear_calls();
  Block* const rest = rig.allocate(52 * MiB, rig.a);
  CHECK_EQ(rig.address(rest), at + 12 * MiB);
  rig.expect_calls({});
  rig.allocator->free(piece); // free neighbours of two streams are not merged
  rig.allocator->free(rest);
  CHECK_EQ(rig.allocator->snapshot().at(0).blocks.size(), std::size_t{2});
  rig.check();
}

TEST(the_host_waits_before_it_takes_a_block_of_a_stream) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.allocator->set_home(block, Location::host(), rig.a); // the device used it there, in place
  rig.allocator->free(block);
  rig.calls.hold(rig.a);
  const Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, rig.a);
  rig.calls.clear_calls();
  Block* const taken = rig.allocator->allocate(12 * MiB, Location::host(), Stream::host());
  CHECK_EQ(rig.address(taken), at);
  rig.expect_calls({"query_stream", "synchronize_stream"});
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 1);
  CHECK_EQ(rig.allocator->statistics(Location::host()).num_host_waits, 1);
  CHECK(rig.runtime->query_event(work));
  rig.allocator->free(taken);
  rig.runtime->destroy_event(work);
}

TEST(a_block_of_the_host_needs_no_order) {
  Recorded rig;
  rig.allocator->free(rig.allocator->allocate(12 * MiB, Location::host(), Stream::host()));
  rig.calls.clear_calls();
  Block* const block = rig.allocator->allocate(12 * MiB, Location::host(), rig.a);
  rig.expect_calls({});
  rig.allocator->free(block);
}

TEST(the_host_waits_for_devices_that_exclude_it_before_it_gets_any_block) {
  struct Exclusive final : RecordingRuntime {
    Exclusive() : RecordingRuntime(2) {}
    DeviceProperties device_properties(int device) const override {
      DeviceProperties properties = RecordingRuntime::device_properties(device);
      properties.concurrent_managed_access = device == 0;
      return properties;
    }
  };
  Rig rig(std::make_unique<Exclusive>(), true);
  auto& runtime = static_cast<RecordingRuntime&>(*rig.runtime);
  const auto waited = [&] { return runtime.count("synchronize_device"); };
  rig.allocator->free(rig.allocate(MiB));
  CHECK_EQ(waited(), std::size_t{0}); // the host does not use the block
  for (std::size_t turn = 1; turn <= 2; ++turn) { // a new segment, then a cached one
    rig.allocator->free(rig.allocator->allocate(MiB, Location::host(), Stream::host()));
    CHECK_EQ(waited(), turn);
  }
  for (const RecordedCall& call : runtime.calls()) {
    CHECK(call.name != "synchronize_device" || call.location == Location::device(1));
  }
  runtime.fail("synchronize_device", 1);
  CHECK_THROWS(RuntimeFailure, rig.allocator->allocate(MiB, Location::host(), Stream::host()));
  rig.check();
}

TEST(a_recorded_stream_is_waited_for) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.allocator->record_stream(block, rig.b);
  rig.allocator->record_stream(block, rig.b);
  rig.keep_busy(rig.b);
  rig.calls.clear_calls();
  rig.allocator->free(block);
  rig.expect_calls({}); // not needed yet
  CHECK(state_at(rig, at) == BlockInfo::State::kPendingFree);
  CHECK_EQ(rig.allocator->statistics().active_bytes[0].current, static_cast<std::int64_t>(12 * MiB));
  CHECK_EQ(rig.allocator->statistics().allocated_bytes[0].current, 0);
  Block* const elsewhere = rig.allocate(12 * MiB, rig.a);
  CHECK(rig.address(elsewhere) != at);
  CHECK_EQ(rig.calls.count("record_event"), std::size_t{1});
  rig.check();
  rig.calls.release(rig.b);
  Block* const again = rig.allocate(12 * MiB, rig.a);
  CHECK_EQ(rig.address(again), at);
  CHECK_EQ(rig.allocator->statistics().active_bytes[0].peak, static_cast<std::int64_t>(24 * MiB));
  rig.check();
  rig.allocator->free(elsewhere);
  rig.allocator->free(again);
}

TEST(the_stream_a_block_had_before_it_moved_is_waited_for) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.keep_busy(rig.a);
  rig.keep_busy(rig.b);
  rig.allocator->set_home(block, kDevice, rig.b);
  rig.allocator->set_home(block, Location::host(), Stream::host());
  rig.allocator->free(block);
  CHECK(state_at(rig, at) == BlockInfo::State::kPendingFree);
  rig.allocator->free(rig.allocate(512, rig.a)); // records an event
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 2);
  rig.calls.release(rig.a);
  rig.allocator->free(rig.allocate(512, rig.a)); // polls it
  CHECK(state_at(rig, at) == BlockInfo::State::kPendingFree);
  rig.calls.release(rig.b);
  Block* const taken = rig.allocator->allocate(12 * MiB, Location::host(), Stream::host());
  CHECK_EQ(rig.address(taken), at);
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 0);
  rig.allocator->free(taken);
  rig.check();
}

TEST(a_block_that_returns_to_its_stream_needs_no_event) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  rig.allocator->set_home(block, Location::host(), Stream::host());
  rig.allocator->set_home(block, kDevice, rig.a);
  rig.calls.clear_calls();
  rig.allocator->free(block);
  rig.expect_calls({});
  rig.check();
}

TEST(a_stream_that_was_seen_idle_is_not_asked_again) {
  Recorded rig;
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(rig.allocate(12 * MiB, rig.a));
  }
  for (Block* const block : std::exchange(blocks, {})) {
    rig.allocator->free(block);
  }
  rig.calls.clear_calls();
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(rig.allocate(12 * MiB, rig.b));
  }
  rig.expect_calls({"query_stream"});
  Block* const later = rig.allocate(12 * MiB, rig.a); // the cache has no block from before
  rig.allocator->free(later);
  rig.calls.clear_calls();
  blocks.push_back(rig.allocate(12 * MiB, rig.b));
  rig.expect_calls({"query_stream"});
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
}

TEST(emptying_the_cache_forgets_which_streams_were_idle) {
  Recorded rig;
  Block* const held = rig.allocate(512, rig.a);
  rig.allocator->free(rig.allocate(1024, rig.a));
  rig.allocator->free(rig.allocate(1024, rig.b)); // `a` is seen idle here
  rig.allocator->free(rig.allocate(2048, rig.a));
  rig.allocator->empty_cache();
  rig.calls.clear_calls();
  rig.allocator->free(rig.allocate(2048, rig.b));
  rig.expect_calls({"query_stream"}); // "a" may be another stream by now
  rig.allocator->free(held);
}

HARNESS_MAIN()
