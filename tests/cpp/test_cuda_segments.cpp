// Managed segments of CudaRuntime, from cudaMallocManaged and from memory pools: the limit, sizes of pools, errors.
#include <optional>
#include <string>
#include <vector>

#include "cuda_rig.h"

using namespace contract;
using namespace cuda_rig;

TEST(the_limit_holds_for_both_sources_of_segments) {
  for (const bool pool : {false, true}) {
    const auto runtime = made(pool);
    const char* const call = pool ? "cudaMallocFromPoolAsync" : "cudaMallocManaged";
    runtime->set_limit(4 * MiB);
    void* const first = runtime->allocate_managed(3 * MiB, kDevice);
    CHECK_THROWS(OutOfMemory, runtime->allocate_managed(MiB + 1, kDevice));
    CHECK_EQ(fake_cuda_count(call), std::size_t{1}); // the driver was not called
    void* const second = runtime->allocate_managed(MiB, Location::host());
    CHECK_EQ(fake_cuda_live_bytes(call), 4 * MiB);
    CHECK_THROWS(OutOfMemory, runtime->allocate_managed(1, Location::device(1)));
    runtime->free_managed(first);
    runtime->free_managed(second);
    CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
    all_is_well();
  }
}

TEST(the_hosts_memory_bounds_both_sources) {
  for (const bool pool : {false, true}) {
    const auto runtime = made(pool);
    try {
      runtime->allocate_managed(runtime->host_memory_available() + 64 * GiB, kDevice);
      harness::fail(__FILE__, __LINE__, "more than the host's memory was allocated");
    } catch (const OutOfMemory& error) {
      CHECK(error.cause == OutOfMemory::Cause::kHost);
    }
    CHECK_EQ(fake_cuda_count("cudaMallocManaged") + fake_cuda_count("cudaMallocFromPoolAsync"), std::size_t{0});
  }
}

TEST(a_pool_is_as_large_as_the_limit_and_follows_it) {
  const auto runtime = made(true);
  runtime->set_limit(8 * MiB);
  void* const first = runtime->allocate_managed(6 * MiB, kDevice);
  CHECK_EQ(fake_cuda_count("cudaMemPoolCreate"), std::size_t{1});
  runtime->set_limit(16 * MiB);
  void* const second = runtime->allocate_managed(8 * MiB, Location::host());
  CHECK_EQ(fake_cuda_count("cudaMemPoolCreate"), std::size_t{2}); // size of the second pool: 16 - 6 MiB
  CHECK_THROWS(OutOfMemory, runtime->allocate_managed(4 * MiB, kDevice)); // 14 of 16 MiB are in use
  runtime->free_managed(first);
  CHECK_EQ(fake_cuda_count("cudaMemPoolDestroy"), std::size_t{1});
  // does not fit in the pool of 10 MiB, of which 8 are in use
  void* const rest = runtime->allocate_managed(8 * MiB, kDevice);
  CHECK_EQ(fake_cuda_count("cudaMemPoolCreate"), std::size_t{3});
  CHECK_EQ(runtime->managed_bytes(), 16 * MiB);
  runtime->free_managed(rest);
  runtime->set_limit(std::nullopt);
  void* const third = runtime->allocate_managed(32 * MiB, kDevice);
  runtime->free_managed(second);
  runtime->free_managed(third);
  all_is_well();
}

TEST(a_pool_caches_nothing_and_the_driver_enforces_its_size) {
  const auto runtime = made(true);
  runtime->set_limit(8 * MiB);
  void* const ptr = runtime->allocate_managed(6 * MiB, kDevice);
  cudaMemPool_t pool = nullptr;
  CHECK(fake_cuda_pool_of(ptr, &pool) == cudaSuccess);
  const auto reserved = [&] {
    std::uint64_t bytes = 0;
    CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &bytes) == cudaSuccess);
    return bytes;
  };
  CHECK_EQ(reserved(), 6 * MiB);
  void* past = nullptr; // without CudaRuntime's own check
  CHECK(cudaMallocFromPoolAsync(&past, 3 * MiB, pool, nullptr) == cudaErrorMemoryAllocation);
  cudaGetLastError();
  runtime->free_managed(ptr);
  CHECK_EQ(reserved(), std::uint64_t{0});
  all_is_well();
}

TEST(the_release_threshold_bounds_the_cache_of_both_sources) {
  for (const bool from_pool : {false, true}) {
    AllocatorOptions options = apart();
    options.release_threshold = 20 * MiB;
    Rig rig(made(from_pool), true, options);
    std::vector<Block*> blocks;
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(rig.allocate(12 * MiB));
    }
    CHECK_EQ(rig.runtime->managed_bytes(), 48 * MiB);
    cudaMemPool_t pool = nullptr;
    CHECK(!from_pool || fake_cuda_pool_of(rig.allocator->data(blocks[0]), &pool) == cudaSuccess);
    for (Block* const block : blocks) {
      rig.allocator->free(block);
    }
    CHECK_EQ(rig.runtime->managed_bytes(), 12 * MiB);
    if (from_pool) {
      std::uint64_t bytes = 0; // the driver's own cache must be empty
      CHECK(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &bytes) == cudaSuccess);
      CHECK_EQ(bytes, 12 * MiB);
    }
    rig.check();
  }
  all_is_well();
}

TEST(unsupported_pools_are_refused_by_name) {
  contains(message_of([] { made(true, {.pools = false}); }), "device 0 has no memory pools; cuda_segments:malloc");
  made(true);
  fake_cuda_fail("cudaMemPoolCreate", 1, cudaErrorNotSupported);
  CudaRuntime runtime(true);
  contains(message_of([&] { runtime.allocate_managed(1, kDevice); }), "the driver makes none; cuda_segments:malloc");
  CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
}

TEST(pool_memory_is_freed_after_the_work_of_every_device) {
  const auto runtime = made(true);
  fake_cuda_hold(1);
  const Stream there = runtime->create_stream(1, 0);
  void* const ptr = runtime->allocate_managed(4 * MiB, kDevice);
  runtime->prefetch(ptr, 4 * MiB, Location::device(1), there);
  CHECK(!runtime->query_stream(there));
  runtime->free_managed(ptr);
  CHECK(runtime->query_stream(there));
  runtime->destroy_stream(there);
  all_is_well();
}

HARNESS_MAIN()
