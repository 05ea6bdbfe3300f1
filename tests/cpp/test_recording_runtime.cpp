// The behaviour of the recording runtime on which other tests rely.
#include <cstring>
#include <string>

#include "harness.h"
#include "recording/recording_runtime.h"
#include "runtime/bytes.h"

using namespace torch_uvm;

namespace {

Stream stream0() {
  return Stream::default_of(0);
}

} // namespace

TEST(managed_memory_is_real_zeroed_and_starts_on_two_mebibytes) {
  RecordingRuntime runtime;
  auto* ptr = static_cast<unsigned char*>(runtime.allocate_managed(3 * MiB, Location::device(0)));
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(ptr) % (2 * MiB), 0U);
  CHECK_EQ(int{ptr[0]}, 0);
  std::memset(ptr, 7, 3 * MiB);
  CHECK_EQ(int{ptr[3 * MiB - 1]}, 7);
  CHECK_EQ(runtime.live_objects(), 1U);
  runtime.free_managed(ptr);
  CHECK_EQ(runtime.live_objects(), 0U);
}

TEST(calls_are_logged_in_order_with_their_arguments) {
  RecordingRuntime runtime(2);
  void* ptr = runtime.allocate_managed(MiB, Location::device(1));
  runtime.prefetch(ptr, 4096, Location::host(), Stream::default_of(1));
  runtime.free_managed(ptr);
  const auto calls = runtime.calls();
  CHECK_EQ(calls.size(), 3U);
  CHECK_EQ(calls[0].name, "allocate_managed");
  CHECK(calls[0].ptr == ptr && calls[0].bytes == MiB && calls[0].location == Location::device(1));
  CHECK_EQ(calls[1].name, "prefetch");
  CHECK(calls[1].ptr == ptr && calls[1].bytes == 4096 && calls[1].location == Location::host());
  CHECK(calls[1].stream == Stream::default_of(1));
  CHECK_EQ(calls[2].name, "free_managed");
  CHECK_EQ(runtime.count("prefetch"), 1U);
  runtime.clear_calls();
  CHECK_EQ(runtime.calls().size(), 0U);
}

TEST(the_nth_call_of_a_name_fails_once_and_changes_nothing) {
  RecordingRuntime runtime;
  runtime.fail("allocate_managed", 2);
  void* first = runtime.allocate_managed(MiB, Location::host());
  CHECK_THROWS(OutOfMemory, runtime.allocate_managed(MiB, Location::host()));
  CHECK(runtime.calls().back().failed);
  CHECK_EQ(runtime.managed_bytes(), MiB);
  CHECK_EQ(runtime.live_objects(), 1U);
  void* third = runtime.allocate_managed(MiB, Location::host());
  runtime.free_managed(first);
  runtime.free_managed(third);
}

TEST(any_call_but_free_and_destroy_can_fail) {
  RecordingRuntime runtime;
  void* ptr = runtime.allocate_managed(MiB, Location::host());
  const Event event = runtime.create_event(0, false);
  runtime.fail("*", 2);
  runtime.destroy_event(event);
  runtime.free_managed(ptr);
  runtime.synchronize_device(0);
  CHECK_THROWS(RuntimeFailure, runtime.create_stream(0, 0));
  CHECK_EQ(runtime.live_objects(), 0U);
  runtime.fail("record_event", 1);
  runtime.clear_failures();
  const Event other = runtime.create_event(0, false);
  runtime.record_event(other, stream0());
  runtime.destroy_event(other);
  CHECK_THROWS(InvalidArgument, runtime.fail("free_managed", 1));
  CHECK_THROWS(InvalidArgument, runtime.fail("alocate_managed", 1));
  CHECK_THROWS(InvalidArgument, runtime.fail("prefetch", 0));
}

TEST(held_work_is_incomplete_until_it_is_released) {
  RecordingRuntime runtime;
  const Event before = runtime.create_event(0, false);
  const Event after = runtime.create_event(0, false);
  CHECK(runtime.query_event(before)); // never recorded
  runtime.record_event(before, stream0());
  runtime.hold(stream0());
  CHECK(runtime.query_event(before));
  CHECK(runtime.query_stream(stream0()));
  runtime.record_event(after, stream0());
  CHECK(!runtime.query_event(after));
  CHECK(!runtime.query_stream(stream0()));
  runtime.release(stream0());
  CHECK(runtime.query_event(after));
  CHECK(runtime.query_stream(stream0()));
  runtime.destroy_event(before);
  runtime.destroy_event(after);
}

TEST(waiting_releases_held_work_of_all_streams_it_depends_on) {
  RecordingRuntime runtime;
  const Stream side = runtime.create_stream(0, 0);
  const Event first = runtime.create_event(0, false);
  const Event second = runtime.create_event(0, false);
  runtime.hold(stream0());
  runtime.record_event(first, stream0());
  runtime.wait_event(side, first);
  runtime.record_event(second, side);
  CHECK(!runtime.query_event(second)); // `side` is not held, but waits for held work
  runtime.synchronize_event(second);
  CHECK(runtime.query_event(first));
  CHECK(runtime.query_event(second));

  runtime.hold(side);
  runtime.record_event(second, side);
  CHECK(!runtime.query_event(second));
  runtime.synchronize_device(0);
  CHECK(runtime.query_event(second));
  runtime.destroy_event(first);
  runtime.destroy_event(second);
  runtime.destroy_stream(side);
  CHECK_EQ(runtime.live_objects(), 0U);
}

TEST(streams_that_wait_for_each_other_in_turn_do_not_recurse_forever) {
  RecordingRuntime runtime;
  const Stream left = runtime.create_stream(0, 0);
  const Stream right = runtime.create_stream(0, 0);
  const Event event = runtime.create_event(0, false);
  runtime.hold(left);
  runtime.hold(right);
  for (int i = 0; i < 100; ++i) {
    runtime.record_event(event, i % 2 == 0 ? left : right);
    runtime.wait_event(i % 2 == 0 ? right : left, event);
  }
  CHECK(!runtime.query_event(event));
  runtime.release(left);
  CHECK(!runtime.query_event(event));
  runtime.release(right);
  CHECK(runtime.query_event(event));
  CHECK(runtime.query_stream(left));
  runtime.destroy_event(event);
  runtime.destroy_stream(left);
  runtime.destroy_stream(right);
}

TEST(an_event_that_is_destroyed_while_waited_for_still_orders) {
  RecordingRuntime runtime;
  const Stream side = runtime.create_stream(0, 0);
  const Event event = runtime.create_event(0, false);
  runtime.hold(stream0());
  runtime.record_event(event, stream0());
  runtime.wait_event(side, event);
  runtime.destroy_event(event);
  CHECK(!runtime.query_stream(side));
  runtime.release(stream0());
  CHECK(runtime.query_stream(side));
  runtime.destroy_stream(side);
  CHECK_THROWS(InvalidArgument, runtime.query_event(event));
  CHECK_THROWS(InvalidArgument, runtime.query_stream(side));
}

TEST(range_attributes_replay_the_hints) {
  RecordingRuntime runtime(2);
  auto* ptr = static_cast<char*>(runtime.allocate_managed(MiB, Location::host()));
  runtime.advise(ptr, MiB, Advice::kSetAccessedBy, Location::device(1));
  runtime.advise(ptr, MiB, Advice::kSetPreferredLocation, Location::host());
  auto attributes = runtime.range_attributes(ptr, MiB);
  CHECK(attributes.uniform);
  CHECK(attributes.preferred_location == Location::host());
  CHECK(attributes.accessed_by == std::vector<Location>{Location::device(1)});
  CHECK(!attributes.last_prefetch);
  runtime.prefetch(ptr + 4096, 4096, Location::device(0), stream0());
  runtime.advise(ptr, 4096, Advice::kUnsetPreferredLocation, Location::host());
  attributes = runtime.range_attributes(ptr, MiB);
  CHECK(!attributes.uniform);
  CHECK(!attributes.preferred_location && !attributes.last_prefetch);
  CHECK(attributes.accessed_by == std::vector<Location>{Location::device(1)});
  attributes = runtime.range_attributes(ptr + 4096, 4096);
  CHECK(attributes.uniform);
  CHECK(attributes.last_prefetch == Location::device(0));
  runtime.free_managed(ptr);
}

TEST(copies_move_bytes_and_plain_memory_is_bounded) {
  RecordingRuntime runtime;
  auto* pinned = static_cast<char*>(runtime.allocate_pinned(64));
  auto* device = static_cast<char*>(runtime.allocate_device(64, 0));
  std::memcpy(pinned, "bytes", 6);
  runtime.copy_async(device, pinned, 64, stream0());
  CHECK_EQ(std::string(device), "bytes");
  runtime.zero_async(device + 1, 1, stream0());
  CHECK_EQ(std::string(device), "b");
  CHECK_EQ(std::string(device + 2), "tes");
  runtime.fail("zero_async", 1);
  CHECK_THROWS(RuntimeFailure, runtime.zero_async(device, 1, stream0()));
  const MemoryInfo info = runtime.memory_info(0);
  CHECK_EQ(info.free, info.total - 64);
  CHECK_THROWS(OutOfMemory, runtime.allocate_device(info.total, 0));
  runtime.free_device(device);
  runtime.free_pinned(pinned);
  CHECK_EQ(runtime.live_objects(), 0U);
}

TEST(unknown_handles_are_refused) {
  RecordingRuntime runtime(2);
  auto* ptr = static_cast<char*>(runtime.allocate_managed(MiB, Location::host()));
  CHECK_THROWS(InvalidArgument, RecordingRuntime(0));
  CHECK_THROWS(InvalidArgument, runtime.allocate_managed(0, Location::host()));
  CHECK_THROWS(InvalidArgument, runtime.allocate_managed(1, Location::device(2)));
  CHECK_THROWS(InvalidArgument, runtime.prefetch(ptr, MiB + 1, Location::device(0), stream0()));
  CHECK_THROWS(InvalidArgument, runtime.prefetch(ptr, 0, Location::device(0), stream0()));
  CHECK_THROWS(InvalidArgument, runtime.prefetch(ptr, MiB, Location::device(2), stream0()));
  CHECK_THROWS(InvalidArgument, runtime.prefetch(ptr, MiB, Location::device(0), Stream::host()));
  CHECK_THROWS(InvalidArgument, runtime.record_event(Event{}, stream0()));
  CHECK_THROWS(InvalidArgument, runtime.query_stream(Stream::default_of(2)));
  CHECK_THROWS(InvalidArgument, runtime.create_stream(-1, 0));
  CHECK_THROWS(InvalidArgument, runtime.memory_info(2));
  runtime.free_managed(ptr);
  runtime.free_managed(ptr + 64); // not an allocation's address: ignored
  runtime.free_managed(nullptr);
}

HARNESS_MAIN()
