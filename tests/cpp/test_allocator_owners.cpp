// Calls by the owner of a block: tags, frees after one event, and hand-overs to another stream.
#include "room_helpers.h"

using namespace contract;

TEST(a_tag_goes_with_its_block) {
  on_each([](Rig& rig) {
    const Stream other = rig.stream();
    Block* const block = rig.allocate(1000);
    rig.allocator->set_tag(block, tag_of(7));
    rig.allocator->record_stream(block, other);
    CHECK(rig.allocator->tag(block) == tag_of(7));
    rig.check();
    const std::uintptr_t at = rig.address(block);
    rig.allocator->free(block); // pending
    rig.check();
    rig.runtime->synchronize_device(0);
    Block* const again = rig.allocate(1000);
    CHECK_EQ(rig.address(again), at);
    CHECK(rig.allocator->tag(again) == nullptr);
    rig.allocator->free(again);
  });
}

TEST(a_block_freed_after_an_event_waits_only_for_it) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream copies = rig.stream();
  Block* const block = rig.allocate(24 * MiB);
  const std::uintptr_t at = rig.address(block);
  calls.hold(copies);
  const Event ready = calls.create_event(0, false);
  calls.record_event(ready, copies);
  rig.allocator->free_after(block, ready, copies);
  rig.check();
  calls.clear_calls();
  // Both parts of it wait separately.
  Block* const first = rig.allocate(12 * MiB);
  Block* const second = rig.allocate(12 * MiB);
  CHECK_EQ(rig.address(first), at);
  CHECK_EQ(rig.address(second), at + 12 * MiB);
  CHECK_EQ(calls.count("wait_event"), std::size_t{2});
  CHECK_EQ(calls.count("record_event"), std::size_t{0}); // an event recorded now would be behind all queued work
  rig.check();
  rig.allocator->free(first);
  calls.release(copies);
  rig.allocator->free(second);
  Block* const again = rig.allocate(24 * MiB);
  CHECK_EQ(rig.address(again), at); // merged again
  CHECK_EQ(calls.count("wait_event"), std::size_t{2});
  rig.allocator->free(again);
  rig.check();
}

TEST(a_block_freed_after_an_event_that_is_reached_waits_for_nothing) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream copies = rig.stream();
  Block* const block = rig.allocate(16 * MiB);
  const Event ready = calls.create_event(0, false);
  calls.record_event(ready, copies);
  rig.allocator->free_after(block, ready, copies);
  calls.hold(copies); // work queued from now on does not matter
  calls.clear_calls();
  rig.allocator->free(rig.allocate(16 * MiB));
  CHECK_EQ(calls.count("wait_event"), std::size_t{0});
  calls.release(copies);
}

TEST(a_block_handed_over_is_reused_on_its_new_stream_with_no_call) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream a = rig.stream(), b = rig.stream(), c = rig.stream();
  Block* const block = rig.allocate(12 * MiB, a);
  const std::uintptr_t at = rig.address(block);
  rig.allocator->record_stream(block, b);
  for (const Stream stream : {a, b, c}) {
    calls.hold(stream);
  }
  const Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, a);
  calls.clear_calls();
  rig.allocator->hand_over(block, c);
  CHECK(rig.allocator->stream(block) == c);
  CHECK_EQ(rig.allocator->streams(block).size(), std::size_t{1});
  rig.check();
  rig.allocator->free(block);
  Block* const again = rig.allocator->try_allocate(12 * MiB, kDevice, c);
  CHECK_EQ(rig.address(again), at);
  CHECK(calls.calls().empty());
  rig.allocator->free(again);
  Block* const of_a = rig.allocate(12 * MiB, a); // waits for `c` only
  CHECK_EQ(rig.address(of_a), at);
  CHECK_EQ(calls.count("query_stream"), std::size_t{1});
  CHECK(calls.calls().at(0).stream == c);
  CHECK_THROWS(InvalidArgument, rig.allocator->hand_over(of_a, Stream::default_of(7)));
  rig.allocator->free(of_a);
  CHECK_THROWS(InvalidArgument, rig.allocator->hand_over(nullptr, a));
  rig.runtime->destroy_event(work);
}

HARNESS_MAIN()
