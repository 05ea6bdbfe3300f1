// Seeded schedules of the emulated runtime. A missing synchronisation produces a wrong result; a correct program is
// right under every seed.
#include <optional>
#include <random>
#include <vector>

#include "emulated_queue_rig.h"

using namespace torch_uvm;
using namespace emulated_helpers;

namespace {

constexpr int kSeeds = 1000;

// Doubles a number on the device: a kernel that reads `in` and writes `out`.
void doubled(EmulatedRuntime& runtime, Stream stream, const int* in, int* out) {
  const Touch accesses[]{{in, sizeof *in, false}, {out, sizeof *out, true}};
  runtime.begin_kernel(stream, accesses);
  *out = 2 * *in;
  runtime.end_kernel(stream, {});
}

// Three streams on two devices: copy in, compute, copy out. Returns the host's result.
int pipeline(EmulatedRuntime& runtime, bool with_events) {
  const Stream in = runtime.create_stream(0, 0);
  const Stream compute = stream0();
  const Stream out = runtime.create_stream(1, 0);
  const Event loaded = runtime.create_event(0, false);
  const Event computed = runtime.create_event(0, false);
  Pinned source(runtime, 64), target(runtime, 64);
  Managed memory(runtime, 2);
  int* x = static_cast<int*>(memory.at(0));
  int* y = static_cast<int*>(memory.at(1));
  *source.ptr = 21;
  *target.ptr = -1;

  runtime.copy_async(x, source.ptr, sizeof(int), in);
  runtime.record_event(loaded, in);
  if (with_events) {
    runtime.wait_event(compute, loaded);
  }
  doubled(runtime, compute, x, y);
  runtime.record_event(computed, compute);
  if (with_events) {
    runtime.wait_event(out, computed);
  }
  runtime.copy_async(target.ptr, y, sizeof(int), out);
  if (with_events) {
    runtime.synchronize_stream(out);
  }
  const int result = *target.ptr;
  runtime.destroy_event(loaded);
  runtime.destroy_event(computed);
  runtime.destroy_stream(in);
  runtime.destroy_stream(out);
  return result;
}

} // namespace

TEST(a_program_with_its_synchronisation_is_right_for_every_seed) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    EmulatedRuntime runtime(devices(2, seed));
    CHECK_EQ(pipeline(runtime, true), 42);
  }
}

TEST(a_program_without_synchronisation_is_wrong_for_many_seeds) {
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    EmulatedRuntime runtime(devices(2, seed));
    wrong += pipeline(runtime, false) == 42 ? 0 : 1;
  }
  CHECK(wrong > kSeeds / 10);
  CHECK(wrong < kSeeds); // some schedules are right by chance
}

TEST(the_same_seed_repeats_a_schedule) {
  for (int seed = 0; seed < 50; ++seed) {
    EmulatedRuntime first(devices(2, seed));
    EmulatedRuntime second(devices(2, seed));
    CHECK_EQ(pipeline(first, false), pipeline(second, false));
    CHECK_EQ(first.time_us(), second.time_us());
    CHECK_EQ(first.counters().bytes_to_device, second.counters().bytes_to_device);
  }
}

TEST(a_query_is_truthful_and_does_not_force) {
  int unfinished = 0;
  for (int seed = 0; seed < 200; ++seed) {
    EmulatedRuntime runtime(devices(1, seed));
    Pinned values(runtime, 64);
    values.ptr[0] = 1;
    runtime.copy_async(values.ptr + 1, values.ptr, sizeof(int), stream0());
    const bool done = values.ptr[1] == 1;
    CHECK_EQ(runtime.query_stream(stream0()), done);
    unfinished += done ? 0 : 1;
    while (!runtime.query_stream(stream0())) {
    } // repeated queries make progress
    CHECK_EQ(values.ptr[1], 1);
  }
  CHECK(unfinished > 0);
}

TEST(every_wait_forces_its_dependencies) {
  for (int seed = 0; seed < 200; ++seed) {
    for (int way = 0; way < 5; ++way) {
      EmulatedRuntime runtime(devices(2, seed));
      const Stream side = runtime.create_stream(1, 0);
      const Event event = runtime.create_event(1, false);
      Pinned values(runtime, 64);
      Managed memory(runtime, 1);
      values.ptr[0] = 9;
      runtime.copy_async(memory.ptr, values.ptr, sizeof(int), side);
      runtime.record_event(event, side);
      runtime.wait_event(stream0(), event);
      runtime.copy_async(values.ptr + 1, memory.ptr, sizeof(int), stream0());
      runtime.record_event(event, stream0());
      switch (way) {
        case 0:
          runtime.synchronize_stream(stream0());
          break;
        case 1:
          runtime.synchronize_event(event);
          break;
        case 2:
          runtime.synchronize_device(0);
          break;
        case 3:
          runtime.begin_kernel(stream0(), {});
          break;
        case 4:
          runtime.free_managed(runtime.allocate_managed(1, Location::host())); // does not wait
          runtime.synchronize_device(1);
          runtime.synchronize_device(0);
          break;
      }
      CHECK_EQ(values.ptr[1], 9);
      runtime.destroy_event(event);
      runtime.destroy_stream(side);
    }
  }
}

TEST(freeing_forces_work_that_uses_the_memory) {
  for (int seed = 0; seed < 200; ++seed) {
    EmulatedRuntime runtime(devices(1, seed));
    const Stream side = runtime.create_stream(0, 0);
    const Event event = runtime.create_event(0, false);
    Pinned values(runtime, 64);
    values.ptr[0] = 4;
    {
      Managed memory(runtime, 1);
      runtime.copy_async(memory.ptr, values.ptr, sizeof(int), stream0());
      runtime.record_event(event, stream0());
      runtime.wait_event(side, event);
      memory.prefetch(0, 1, Location::host());
      runtime.copy_async(values.ptr + 1, memory.ptr, sizeof(int), side);
    }
    CHECK_EQ(values.ptr[1], 4);
    runtime.destroy_event(event);
    runtime.destroy_stream(side);
  }
}

// A random sequence of waits over random streams and events always terminates.
TEST(waiting_never_deadlocks) {
  for (int seed = 0; seed < 300; ++seed) {
    std::mt19937 choose(static_cast<unsigned>(seed));
    const auto schedule = seed % 3 == 0 ? std::nullopt : std::optional<std::uint64_t>(seed);
    EmulatedRuntime runtime(devices(2, schedule));
    std::vector<Stream> streams{Stream::default_of(0), Stream::default_of(1)};
    std::vector<Event> events;
    for (int i = 0; i < 3; ++i) {
      streams.push_back(runtime.create_stream(i % 2, 0));
      events.push_back(runtime.create_event(i % 2, false));
    }
    // Each stream has its own bytes: the order of waiting is random, the result is not.
    Pinned values(runtime, streams.size() * MiB);
    Managed memory(runtime, streams.size() * 16);
    for (int step = 0; step < 100; ++step) {
      const std::size_t chosen = choose() % streams.size();
      const Stream stream = streams[chosen];
      int* host = values.ptr + chosen * MiB / sizeof(int);
      void* device = memory.at(chosen * 16);
      const Event event = events[choose() % events.size()];
      switch (choose() % 9) {
        case 0:
          runtime.copy_async(device, host, (choose() % 3 + 1) * kPage, stream);
          break;
        case 1:
          runtime.copy_async(host, device, (choose() % 3 + 1) * kPage, stream);
          break;
        case 2:
          runtime.prefetch(memory.at(choose() % memory.pages), kPage, Location{static_cast<int>(choose() % 3) - 1},
                           stream);
          break;
        case 3:
        case 4:
          runtime.record_event(event, stream);
          break;
        case 5:
        case 6:
          runtime.wait_event(stream, event);
          break;
        case 7:
          runtime.query_event(event) ? runtime.synchronize_stream(stream) : runtime.synchronize_event(event);
          break;
        case 8:
          runtime.begin_kernel(stream, {});
          runtime.end_kernel(stream, {});
          break;
      }
    }
    runtime.synchronize_device(0);
    runtime.synchronize_device(1);
    CHECK_EQ(runtime.pending_operations(), 0U);
  }
}

HARNESS_MAIN()
