// Managed segments of CudaRuntime, from cudaMallocManaged: the limit, and the host's memory.
#include "cuda_rig.h"

using namespace contract;
using namespace cuda_rig;

TEST(the_limit_holds) {
  const auto runtime = made();
  const char* const call = "cudaMallocManaged";
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

TEST(the_hosts_memory_bounds_segments) {
  const auto runtime = made();
  try {
    runtime->allocate_managed(runtime->host_memory_available() + 64 * GiB, kDevice);
    harness::fail(__FILE__, __LINE__, "more than the host's memory was allocated");
  } catch (const OutOfMemory& error) {
    CHECK(error.cause == OutOfMemory::Cause::kHost);
  }
  CHECK_EQ(fake_cuda_count("cudaMallocManaged"), std::size_t{0});
}

HARNESS_MAIN()
