// Streams, events, copies and schedules: order, waiting, and what a missing synchronisation looks like.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "emulated_helpers.h"
#include "harness.h"
#include "runtime/emulated/cost_profile.h"
#include "runtime/testing/emulated_failures.h"

using namespace torch_uvm;
using namespace emulated_helpers;

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer ends a child that starts a thread, which is just what is tested here.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}
#endif

namespace {

constexpr std::size_t kBig = 8 * MiB; // more than is copied at once by the caller
constexpr int kSeeds = 1000;

Stream stream0() {
  return Stream::default_of(0);
}

struct Pinned {
  EmulatedRuntime& runtime;
  int* ptr;
  Pinned(EmulatedRuntime& runtime, std::size_t bytes)
      : runtime(runtime), ptr(static_cast<int*>(runtime.allocate_pinned(bytes))) {}
  ~Pinned() {
    runtime.free_pinned(ptr);
  }
  Pinned(const Pinned&) = delete;
};

// Doubles a number on the device: a kernel that reads `in` and writes `out`.
void doubled(EmulatedRuntime& runtime, Stream stream, const int* in, int* out) {
  const Touch accesses[]{{in, sizeof *in, false}, {out, sizeof *out, true}};
  runtime.begin_kernel(stream, accesses);
  *out = 2 * *in;
  runtime.end_kernel(stream, {});
}

// Three streams on two devices: in on one, compute on the next, out on a third. Returns what the host reads.
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

// --- the default schedule ---------------------------------------------------------------------------------

TEST(copies_are_done_in_the_order_of_their_stream) {
  EmulatedRuntime runtime;
  Pinned first(runtime, kBig), second(runtime, kBig), target(runtime, kBig);
  for (int round = 0; round < 20; ++round) {
    std::memset(first.ptr, round, kBig);
    std::memset(second.ptr, 100 + round, kBig);
    runtime.copy_async(target.ptr, first.ptr, kBig, stream0());
    runtime.copy_async(target.ptr, second.ptr, kBig, stream0());
    runtime.synchronize_stream(stream0());
    CHECK(std::memcmp(target.ptr, second.ptr, kBig) == 0);
    CHECK_EQ(runtime.pending_operations(), 0U);
  }
  CHECK_EQ(runtime.counters().copy_calls, 40U);
  CHECK_EQ(runtime.counters(0).synchronisations, 20U);
}

TEST(zeros_are_written_in_the_order_of_their_stream) {
  constexpr std::size_t kInts = kBig / sizeof(int);
  const std::vector<int> zeros(kInts);
  for (const std::size_t bytes : {std::size_t{4}, kBig}) { // at once, and by a worker
    EmulatedRuntime runtime;
    Pinned source(runtime, kBig), target(runtime, kBig);
    auto* memory = static_cast<int*>(runtime.allocate_managed(kBig, Location::device(0)));
    for (int round = 0; round < 20; ++round) {
      std::memset(source.ptr, round + 1, kBig);
      runtime.copy_async(memory, source.ptr, kBig, stream0());
      runtime.zero_async(memory, bytes, stream0());
      runtime.copy_async(target.ptr, memory, kBig, stream0());
      runtime.synchronize_stream(stream0());
      CHECK(std::memcmp(target.ptr, zeros.data(), bytes) == 0);
      CHECK(std::memcmp(target.ptr + bytes / sizeof(int), source.ptr, kBig - bytes) == 0);
    }
    CHECK_EQ(runtime.counters().zero_calls, 20U);
    runtime.zero_async(memory, kBig, stream0()); // freeing waits for it
    runtime.free_managed(memory);
  }
}

TEST(zeros_come_to_memory_of_each_kind_and_nowhere_else) {
  EmulatedRuntime runtime;
  Pinned pinned(runtime, 64);
  *pinned.ptr = 1;
  runtime.zero_async(pinned.ptr, 64, stream0());
  runtime.synchronize_stream(stream0());
  CHECK_EQ(*pinned.ptr, 0);
  void* device = runtime.allocate_device(64, 0);
  runtime.zero_async(device, 64, stream0());
  runtime.zero_async(device, 0, stream0());
  CHECK_EQ(runtime.counters(0).zero_calls, 2U);
  CHECK_THROWS(InvalidArgument, runtime.zero_async(device, 65, stream0()));
  CHECK_THROWS(InvalidArgument, runtime.zero_async(nullptr, 1, stream0()));
  CHECK_THROWS(InvalidArgument, runtime.zero_async(device, 1, Stream::host()));
  runtime.free_device(device);

  Managed memory(runtime, 2); // where the device writes, the pages are
  runtime.reset_counters();
  runtime.zero_async(memory.at(0), 1, stream0());
  CHECK_EQ(runtime.resident_bytes(0), EmulatedRuntime::kPageBytes);
}

TEST(queued_copies_complete_without_being_waited_for) {
  EmulatedRuntime runtime;
  Pinned source(runtime, kBig), target(runtime, kBig);
  std::memset(source.ptr, 5, kBig);
  const Event event = runtime.create_event(0, false);
  runtime.copy_async(target.ptr, source.ptr, kBig, stream0());
  runtime.record_event(event, stream0());
  while (!runtime.query_event(event)) {
    std::this_thread::yield();
  }
  CHECK(std::memcmp(target.ptr, source.ptr, kBig) == 0);
  CHECK(runtime.query_stream(stream0()));
  CHECK_EQ(runtime.counters().synchronisations, 0U);
  runtime.destroy_event(event);
}

TEST(a_kernel_comes_after_what_is_queued_on_its_stream) {
  EmulatedRuntime runtime;
  Pinned source(runtime, kBig);
  auto* memory = static_cast<int*>(runtime.allocate_managed(kBig, Location::device(0)));
  for (int round = 1; round <= 20; ++round) {
    source.ptr[kBig / sizeof(int) - 1] = round;
    runtime.copy_async(memory, source.ptr, kBig, stream0());
    runtime.begin_kernel(stream0(), {});
    CHECK_EQ(memory[kBig / sizeof(int) - 1], round);
    runtime.end_kernel(stream0(), {});
  }
  CHECK_EQ(runtime.counters().synchronisations, 0U); // a kernel's place in its stream is not one
  runtime.free_managed(memory);
}

TEST(events_order_streams_of_several_devices) {
  EmulatedRuntime runtime(devices(2));
  Pinned source(runtime, kBig), middle(runtime, kBig), target(runtime, kBig);
  const Event event = runtime.create_event(0, false);
  for (int round = 0; round < 20; ++round) {
    std::memset(source.ptr, round + 1, kBig);
    runtime.copy_async(middle.ptr, source.ptr, kBig, stream0());
    runtime.record_event(event, stream0());
    runtime.wait_event(Stream::default_of(1), event);
    runtime.copy_async(target.ptr, middle.ptr, kBig, Stream::default_of(1));
    runtime.synchronize_device(1);
    CHECK(std::memcmp(target.ptr, source.ptr, kBig) == 0);
  }
  runtime.destroy_event(event);
}

TEST(freeing_waits_for_copies_that_use_the_memory) {
  EmulatedRuntime runtime;
  Pinned target(runtime, kBig);
  for (int round = 1; round <= 20; ++round) {
    auto* source = static_cast<int*>(runtime.allocate_managed(kBig, Location::host()));
    source[kBig / sizeof(int) - 1] = round;
    runtime.copy_async(target.ptr, source, kBig, stream0());
    runtime.free_managed(source); // a copy that came later would be a segmentation fault
    CHECK_EQ(target.ptr[kBig / sizeof(int) - 1], round);
  }
}

TEST(a_runtime_can_go_with_work_queued) {
  for (const auto seed : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(3)}) {
    std::vector<char> host(kBig);
    EmulatedRuntime runtime(devices(2, seed));
    void* memory = runtime.allocate_managed(kBig, Location::device(0));
    const Event event = runtime.create_event(0, false);
    for (int i = 0; i < 10; ++i) {
      runtime.copy_async(memory, host.data(), kBig, Stream::default_of(i % 2));
      runtime.record_event(event, Stream::default_of(i % 2));
      runtime.wait_event(Stream::default_of(1 - i % 2), event);
    }
  }
}

TEST(threads_may_queue_at_once) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  EmulatedRuntime runtime(devices(2));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      const Stream stream = runtime.create_stream(i % 2, 0);
      const Event event = runtime.create_event(i % 2, false);
      Pinned source(runtime, MiB), target(runtime, MiB);
      for (int round = 0; round < kRounds; ++round) {
        Managed memory(runtime, 16);
        source.ptr[MiB / sizeof(int) - 1] = round;
        runtime.copy_async(memory.ptr, source.ptr, MiB, stream);
        memory.prefetch(0, 8, Location::device(1 - i % 2));
        runtime.copy_async(target.ptr, memory.ptr, MiB, stream);
        runtime.record_event(event, stream);
        runtime.synchronize_event(event);
        wrong += target.ptr[MiB / sizeof(int) - 1] == round ? 0 : 1;
      }
      runtime.destroy_event(event);
      runtime.destroy_stream(stream);
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(wrong.load(), 0);
  CHECK_EQ(runtime.managed_bytes(), 0U);
  CHECK_EQ(runtime.resident_bytes(0) + runtime.resident_bytes(1), 0U);
}

// --- events -----------------------------------------------------------------------------------------------

TEST(a_call_that_is_made_to_fail_changes_nothing_but_a_wait_has_waited) {
  EmulatedRuntime runtime(devices(1, 1));
  EmulatedFailures failures(runtime);
  const Managed memory(runtime, 2);
  const Stream stream = runtime.create_stream(0, 0);
  const std::size_t objects = runtime.live_objects();
  std::memset(memory.at(0), 1, kPage);
  failures.fail("copy_async", 2);
  runtime.copy_async(memory.at(1), memory.at(0), kPage, stream);
  CHECK_EQ(failures.clear(), std::size_t{1});
  failures.fail("*", 1);
  CHECK_THROWS(RuntimeFailure, runtime.synchronize_stream(stream));
  CHECK_EQ(static_cast<const char*>(memory.at(1))[kPage - 1], 1);
  CHECK_EQ(failures.clear(), std::size_t{0});
  for (const char* const name : {"allocate_managed", "allocate_pinned", "allocate_device"}) {
    failures.fail(name, 1);
  }
  CHECK_THROWS(OutOfMemory, runtime.allocate_managed(kPage, Location::host()));
  CHECK_THROWS(OutOfMemory, runtime.allocate_pinned(kPage));
  CHECK_THROWS(OutOfMemory, runtime.allocate_device(kPage, 0));
  CHECK_EQ(runtime.live_objects(), objects);
  CHECK_THROWS(InvalidArgument, failures.fail("free_managed", 1));
}

TEST(an_event_is_reached_if_never_recorded_and_can_be_recorded_again) {
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
  runtime.destroy_event(event); // once more: ignored
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
    runtime.record_event(event, stream0()); // somewhere else now
    runtime.destroy_event(event);
    runtime.destroy_stream(side); // with work in it
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

// --- seeded schedules -------------------------------------------------------------------------------------

TEST(a_program_with_its_synchronisation_is_right_for_every_seed) {
  for (int seed = 0; seed < kSeeds; ++seed) {
    EmulatedRuntime runtime(devices(2, seed));
    CHECK_EQ(pipeline(runtime, true), 42);
  }
}

TEST(a_program_without_it_is_seen_to_be_wrong_for_many_seeds) {
  int wrong = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    EmulatedRuntime runtime(devices(2, seed));
    wrong += pipeline(runtime, false) == 42 ? 0 : 1;
  }
  CHECK(wrong > kSeeds / 10);
  CHECK(wrong < kSeeds); // and is not always found out, or it would be no schedule
}

TEST(a_seed_repeats) {
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
    } // asked often enough, it gets done all the same
    CHECK_EQ(values.ptr[1], 1);
  }
  CHECK(unfinished > 0);
}

TEST(every_wait_forces_what_it_depends_on) {
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
          runtime.free_managed(runtime.allocate_managed(1, Location::host())); // waits for nothing
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

TEST(freeing_forces_what_uses_the_memory) {
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

// A random program over random streams and events ends, whatever it waits for and in whatever order.
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
    // Each stream has bytes of its own: only the order of waiting is random, not the program's result.
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

// --- fork -------------------------------------------------------------------------------------------------

TEST(a_child_has_pinned_memory_and_working_queues) {
  for (const auto seed : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(5)}) {
    EmulatedRuntime runtime(devices(1, seed));
    Pinned source(runtime, kBig), target(runtime, kBig);
    auto* memory = static_cast<int*>(runtime.allocate_managed(64 * MiB, Location::device(0)));
    std::memset(source.ptr, 3, kBig);
    runtime.copy_async(target.ptr, source.ptr, kBig, stream0()); // starts the worker
    const Event event = runtime.create_event(0, false);
    runtime.record_event(event, stream0());
    runtime.before_fork();
    const pid_t child = fork();
    if (child == 0) {
      runtime.after_fork_in_child();
      bool right = runtime.pending_operations() == 0 && runtime.query_event(event);
      right = right && (seed || std::memcmp(target.ptr, source.ptr, kBig) == 0);
      std::memset(source.ptr, 4, kBig);
      runtime.copy_async(target.ptr, source.ptr, kBig, stream0());
      runtime.synchronize_device(0);
      right = right && std::memcmp(target.ptr, source.ptr, kBig) == 0;
      void* more = runtime.allocate_managed(MiB, Location::device(0));
      runtime.free_managed(more);
      _exit(right ? 0 : 1);
    }
    runtime.after_fork_in_parent();
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    runtime.synchronize_device(0);
    CHECK(std::memcmp(target.ptr, source.ptr, kBig) == 0);
    memory[0] = 1;
    runtime.free_managed(memory);
    runtime.destroy_event(event);
  }
}

HARNESS_MAIN()
