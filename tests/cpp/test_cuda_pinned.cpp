// Pinned memory of CudaRuntime: large blocks are mapped, touched and registered; small ones come from cudaHostAlloc.
#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <thread>
#include <vector>

#include "cuda/pinned_memory.h"
#include "cuda_rig.h"
#include "failing_new.h"

using namespace contract;
using namespace cuda_rig;

TEST(large_pinned_blocks_are_mapped_and_registered) {
  const auto runtime = made();
  constexpr std::size_t kBytes = 64 * MiB;
  auto* const pinned = static_cast<char*>(runtime->allocate_pinned(kBytes));
  CHECK_EQ(fake_cuda_live_bytes("cudaHostRegister"), kBytes);
  CHECK_EQ(fake_cuda_count("cudaHostAlloc"), std::size_t{0});
  CHECK_EQ(reinterpret_cast<std::uintptr_t>(pinned) % (2 * MiB), std::uintptr_t{0});
  std::vector<unsigned char> there(kBytes / 4096);
  CHECK_EQ(mincore(pinned, kBytes, there.data()), 0);
  CHECK(std::ranges::all_of(there, [](unsigned char page) { return (page & 1) != 0; })); // every page was touched
  void* const plain = runtime->allocate_device(kBytes, 0);
  pinned[kBytes - 1] = 7;
  runtime->copy_async(plain, pinned, kBytes, kStream);
  fake_cuda_hold(1);
  runtime->zero_async(plain, 1, kStream);
  CHECK(!runtime->query_stream(kStream));
  runtime->free_pinned(pinned);
  CHECK(runtime->query_stream(kStream)); // freeing waits for work that may use the memory
  CHECK(mincore(pinned, kBytes, there.data()) != 0); // unmapped
  runtime->free_device(plain);
  all_is_well();
}

TEST(a_size_that_is_no_multiple_of_the_parts_is_touched_to_its_end) {
  const auto runtime = made();
  constexpr std::size_t kBytes = 50 * MiB + 4096;
  auto* const pinned = static_cast<char*>(runtime->allocate_pinned(kBytes));
  std::vector<unsigned char> there(kBytes / 4096);
  CHECK_EQ(mincore(pinned, kBytes, there.data()), 0);
  CHECK(std::ranges::all_of(there, [](unsigned char page) { return (page & 1) != 0; }));
  runtime->free_pinned(pinned);
  all_is_well();
}

TEST(without_registration_the_driver_allocates_all_pinned_memory) {
  const auto runtime = made();
  fake_cuda_fail("cudaHostRegister", 1, cudaErrorNotSupported);
  void* const first = runtime->allocate_pinned(32 * MiB);
  void* const second = runtime->allocate_pinned(32 * MiB);
  CHECK_EQ(fake_cuda_count("cudaHostRegister"), std::size_t{1}); // registration is not tried again
  CHECK_EQ(fake_cuda_live("cudaHostAlloc"), std::size_t{2});
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  runtime->free_pinned(first);
  runtime->free_pinned(second);
  all_is_well();
}

TEST(more_pinned_memory_than_the_host_has_is_refused) {
  const auto runtime = made();
  const std::size_t available = runtime->host_memory_available();
  CHECK_THROWS(OutOfMemory, runtime->allocate_pinned(available + available / 4 + 64 * MiB));
  CHECK_EQ(fake_cuda_count("cudaHostRegister"), std::size_t{0});
  fake_cuda_fail("cudaHostRegister", 1, cudaErrorMemoryAllocation);
  CHECK_THROWS(OutOfMemory, runtime->allocate_pinned(32 * MiB));
  void* const pinned = runtime->allocate_pinned(32 * MiB); // only that one call failed
  CHECK_EQ(fake_cuda_live("cudaHostRegister"), std::size_t{1});
  runtime->free_pinned(pinned);
  all_is_well();
}

TEST(pinned_memory_is_touched_without_threads_if_none_can_be_created) {
  constexpr std::size_t kBytes = 128 * MiB;
  int without_a_thread = 0;
  for (std::size_t nth = 1;; ++nth) {
    const auto runtime = made();
    cuda::PinnedMemory memory(2);
    failing_new::Countdown failing(nth);
    void* pinned = nullptr;
    try {
      failing([&] { pinned = memory.allocate(kBytes, kBytes); });
    } catch (const std::bad_alloc&) {
      if (fake_cuda_count("cudaHostRegister") != 0) {
        break; // the heap allocation failed inside the fake
      }
      continue;
    }
    std::vector<unsigned char> there(kBytes / 4096);
    CHECK_EQ(mincore(pinned, kBytes, there.data()), 0);
    CHECK(std::ranges::all_of(there, [](unsigned char page) { return (page & 1) != 0; }));
    memory.free(pinned);
    all_is_well();
    if (!failing.has_failed()) {
      break;
    }
    ++without_a_thread;
  }
  CHECK(without_a_thread > 0 || std::thread::hardware_concurrency() == 1);
}

HARNESS_MAIN()
