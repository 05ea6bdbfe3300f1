// CudaRuntime over the fake CUDA runtime: CUDA errors, refused arguments, and the current device of each call.
#include <chrono>
#include <thread>

#include "cuda_rig.h"
#include "runtime/host_memory.h"

using namespace contract;
using namespace cuda_rig;

TEST(a_call_that_fails_changes_nothing_and_leaves_no_error_behind) {
  const auto runtime = made();
  fake_cuda_fail("cudaMallocManaged", 1, cudaErrorMemoryAllocation);
  try {
    runtime->allocate_managed(3 * MiB, kDevice);
    harness::fail(__FILE__, __LINE__, "it did not fail");
  } catch (const OutOfMemory& error) {
    CHECK(error.cause == OutOfMemory::Cause::kRuntime);
    contains(error.what(), "cudaMallocManaged of 3.00 MiB failed: out of memory");
  }
  CHECK(cudaPeekAtLastError() == cudaSuccess); // otherwise torch's next check would blame an unrelated kernel
  CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
  fake_cuda_fail("cudaMallocManaged", 1, cudaErrorInvalidValue);
  contains(message_of([&] { runtime->allocate_managed(1, kDevice); }), "cudaErrorInvalidValue (invalid argument)");
  fake_cuda_fail("cudaHostAlloc", 1, cudaErrorMemoryAllocation);
  CHECK_THROWS(OutOfMemory, runtime->allocate_pinned(1));
  CHECK_THROWS(OutOfMemory, runtime->allocate_device(kMemory + 1, 1));
  fake_cuda_fail("cudaMemPrefetchAsync", 1, cudaErrorInvalidValue);
  void* const ptr = runtime->allocate_managed(MiB, kDevice);
  CHECK_THROWS(RuntimeFailure, runtime->prefetch(ptr, MiB, kDevice, kStream));
  fake_cuda_hold(1);
  runtime->prefetch(ptr, MiB, kDevice, kStream);
  CHECK(!runtime->query_stream(kStream));
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  runtime->free_managed(ptr);
  all_is_well();
}

TEST(a_delay_takes_its_time_in_a_function_of_the_stream) {
  const auto runtime = made();
  const auto begin = std::chrono::steady_clock::now();
  runtime->delay(2000, Stream::default_of(0)); // the fake runs it at once
  CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(2));
  fake_cuda_fail("cudaLaunchHostFunc", 1, cudaErrorInvalidValue);
  CHECK_THROWS(RuntimeFailure, runtime->delay(60e6, Stream::default_of(0)));
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
}

TEST(unknown_devices_and_the_host_stream_are_refused) {
  const auto runtime = made();
  CHECK_THROWS(InvalidArgument, runtime->allocate_managed(1, Location::device(2)));
  CHECK_THROWS(InvalidArgument, runtime->allocate_device(1, -1));
  CHECK_THROWS(InvalidArgument, runtime->create_stream(2, 0));
  CHECK_THROWS(InvalidArgument, runtime->create_event(-1, false));
  CHECK_THROWS(InvalidArgument, runtime->memory_info(2));
  int here = 0;
  CHECK_THROWS(InvalidArgument, runtime->prefetch(&here, 4, Location::device(0), Stream::host()));
  CHECK_THROWS(InvalidArgument, runtime->copy_async(&here, &here, 4, Stream::host()));
  CHECK_THROWS(InvalidArgument, runtime->zero_async(&here, 4, Stream::host()));
  CHECK_THROWS(InvalidArgument, runtime->delay(1, Stream::host()));
  fake_cuda_reset(0, kMemory, 1, "h200");
  CHECK_THROWS(RuntimeFailure, CudaRuntime());
}

TEST(memory_is_allocated_on_its_device_without_contexts_elsewhere) {
  const auto runtime = made();
  CHECK(cudaSetDevice(1) == cudaSuccess);
  void* const managed = runtime->allocate_managed(MiB, Location::device(1));
  void* const hosts = runtime->allocate_managed(MiB, Location::host());
  void* const plain = runtime->allocate_device(MiB, 1);
  void* const pinned = runtime->allocate_pinned(MiB);
  const Stream stream = runtime->create_stream(1, 0);
  runtime->prefetch(managed, MiB, Location::device(1), stream);
  runtime->copy_async(plain, pinned, MiB, stream);
  static_cast<char*>(managed)[MiB - 1] = 1;
  runtime->zero_async(managed, MiB, stream);
  runtime->synchronize_device(1);
  CHECK_EQ(int{static_cast<char*>(managed)[MiB - 1]}, 0);
  CHECK_EQ(fake_cuda_has_context(0), 0);
  std::thread([&] { // a new thread's current device is 0
    runtime->free_managed(managed);
    runtime->free_managed(hosts);
    runtime->free_device(plain);
    runtime->free_pinned(pinned);
    runtime->destroy_stream(stream);
    int current = -1;
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK_EQ(current, 0);
  })
      .join();
  all_is_well();
}

TEST(calls_set_their_device_and_restore_the_callers) {
  const auto runtime = made();
  for (const int device : {0, 1}) {
    const Stream stream = runtime->create_stream(device, -100);
    const Event event = runtime->create_event(device, true);
    runtime->record_event(event, stream);
    runtime->wait_event(Stream::default_of(1 - device), event);
    CHECK(runtime->query_event(event));
    runtime->synchronize_event(event);
    CHECK(runtime->query_stream(Stream::default_of(device)));
    runtime->synchronize_stream(stream);
    const Event later = runtime->create_event(device, true);
    runtime->record_event(later, stream);
    CHECK(runtime->elapsed_ms(event, later) > 0);
    CHECK_EQ(runtime->memory_info(device).total, kMemory);
    runtime->destroy_event(event);
    runtime->destroy_event(later);
    runtime->destroy_stream(stream);
    int current = -1;
    CHECK(cudaGetDevice(&current) == cudaSuccess);
    CHECK_EQ(current, 0);
  }
  CHECK_EQ(runtime->device_properties(1).page_bytes, 2 * MiB);
  all_is_well();
}

TEST(synchronising_a_device_without_a_context_does_nothing) {
  const auto runtime = made();
  runtime->synchronize_device(1);
  CHECK(fake_cuda_has_context(1) == 0);
  CHECK_EQ(fake_cuda_count("cudaDeviceSynchronize"), std::size_t{0});
  runtime->free_device(runtime->allocate_device(MiB, 1));
  runtime->synchronize_device(1);
  CHECK_EQ(fake_cuda_count("cudaDeviceSynchronize"), std::size_t{1});
  all_is_well();
}

TEST(the_memory_of_a_device_that_shares_the_hosts_is_the_hosts) {
  CHECK(!made()->device_properties(0).one_memory());
  CHECK_EQ(made()->memory_info(0).total, kMemory);
  for (const char* profile : {"gb10", "gh200"}) {
    const auto runtime = made({.profile = profile});
    const MemoryInfo info = runtime->memory_info(1);
    CHECK_EQ(info.total, operating_system_memory_total());
    CHECK(info.free > 0 && info.free <= info.total);
    CHECK_EQ(fake_cuda_count("cudaMemGetInfo"), std::size_t{0}); // it counts the page cache as used
    all_is_well();
  }
}

HARNESS_MAIN()
