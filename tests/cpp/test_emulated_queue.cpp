// Copies, zeros and kernels of the emulated runtime run in stream order. Threads, frees and forked children handle work
// that is still queued.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "emulated_queue_rig.h"

using namespace torch_uvm;
using namespace emulated_helpers;

#if defined(__SANITIZE_THREAD__)
// ThreadSanitizer kills a forked child that starts a thread. The fork test needs such a child.
extern "C" const char* __tsan_default_options() {
  return "die_after_fork=0";
}
#endif

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
  for (const std::size_t bytes : {std::size_t{4}, kBig}) { // done by the caller, and by a worker
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
    runtime.zero_async(memory, kBig, stream0()); // freeing waits for the zeroing
    runtime.free_managed(memory);
  }
}

TEST(zeroing_works_for_each_kind_of_memory_and_writes_nothing_else) {
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

  Managed memory(runtime, 2); // pages migrate to the device that writes them
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

TEST(a_kernel_runs_after_earlier_work_of_its_stream) {
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
  CHECK_EQ(runtime.counters().synchronisations, 0U); // the ordering of a kernel in its stream does not count as one
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
    runtime.free_managed(source); // a later copy would cause a segmentation fault
    CHECK_EQ(target.ptr[kBig / sizeof(int) - 1], round);
  }
}

TEST(a_runtime_can_be_destroyed_with_queued_work) {
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

TEST(several_threads_may_queue_concurrently) {
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
