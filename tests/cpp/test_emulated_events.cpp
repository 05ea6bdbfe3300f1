// Events of the emulated runtime: record, wait, query, elapsed time.
#include "emulated_queue_rig.h"
#include "runtime/emulated/cost_profile.h"

using namespace torch_uvm;
using namespace emulated_helpers;

TEST(an_unrecorded_event_is_reached_and_events_can_be_recorded_again) {
  EmulatedRuntime runtime(devices(1, 7));
  const Event event = runtime.create_event(0, false);
  CHECK(runtime.query_event(event));
  runtime.synchronize_event(event);
  runtime.wait_event(stream0(), event);
  CHECK_EQ(runtime.pending_operations(), 0U); // nothing to wait for, nothing queued
  for (int round = 0; round < 10; ++round) {
    runtime.record_event(event, stream0());
    runtime.synchronize_event(event);
    CHECK(runtime.query_event(event));
  }
  runtime.destroy_event(event);
  CHECK_THROWS(InvalidArgument, runtime.query_event(event));
  runtime.destroy_event(event); // a second destroy is ignored
  CHECK_EQ(runtime.counters().event_records, 10U);
}

TEST(a_wait_is_for_the_record_before_it_and_survives_the_event) {
  for (int seed = 0; seed < 100; ++seed) {
    EmulatedRuntime runtime(devices(1, seed));
    const Stream side = runtime.create_stream(0, 0);
    const Event event = runtime.create_event(0, false);
    Pinned values(runtime, 64);
    values.ptr[0] = 1;
    runtime.copy_async(values.ptr + 1, values.ptr, sizeof(int), side);
    runtime.record_event(event, side);
    runtime.wait_event(stream0(), event);
    runtime.record_event(event, stream0()); // the event marks another position now
    runtime.destroy_event(event);
    runtime.destroy_stream(side); // destroyed while it has queued work
    runtime.synchronize_stream(stream0());
    CHECK_EQ(values.ptr[1], 1);
    CHECK_THROWS(InvalidArgument, runtime.query_stream(side));
  }
}

TEST(elapsed_time_needs_recorded_events_with_timing) {
  EmulatedRuntime runtime;
  const Event begin = runtime.create_event(0, true);
  const Event end = runtime.create_event(0, true);
  const Event plain = runtime.create_event(0, false);
  CHECK_THROWS(InvalidArgument, runtime.elapsed_ms(begin, end));
  runtime.record_event(begin, stream0());
  runtime.record_event(plain, stream0());
  runtime.begin_kernel(stream0(), {});
  runtime.record_event(end, stream0());
  CHECK_THROWS(InvalidArgument, runtime.elapsed_ms(begin, plain));
  CHECK_EQ(runtime.elapsed_ms(begin, end), CostProfile::named("h200").launch_us / 1e3);
  for (const Event event : {begin, end, plain}) {
    runtime.destroy_event(event);
  }
}

TEST(the_host_is_no_stream) {
  EmulatedRuntime runtime;
  CHECK(runtime.query_stream(Stream::host()));
  runtime.synchronize_stream(Stream::host());
  const Event event = runtime.create_event(0, false);
  CHECK_THROWS(InvalidArgument, runtime.record_event(event, Stream::host()));
  CHECK_THROWS(InvalidArgument, runtime.wait_event(Stream::host(), event));
  runtime.destroy_event(event);
}

HARNESS_MAIN()
