// The allocator's contract on a real GPU, over both sources of managed segments. scripts/check_cuda.sh builds and runs
// it. Each case may reserve 1 GiB; the program refuses to run unless every card has sixteen times that free.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <optional>

#include "allocator_contract.h"
#include "cuda/cuda_runtime.h"

using namespace contract;
using cuda::CudaRuntime;

namespace {

constexpr std::size_t kLimit = 1024 * MiB;
constexpr std::size_t kRoom = 16;

std::unique_ptr<CudaRuntime> made() {
  auto runtime = std::make_unique<CudaRuntime>();
  runtime->set_limit(kLimit);
  return runtime;
}

// Cases that need a second device. All other cases run with one device.
constexpr std::array kNeedTwo{"homes_do_not_share_blocks", "a_moved_block_belongs_to_its_new_home",
                              "the_total_peak_is_the_peak_of_the_sum", "out_of_memory_errors_say_where_the_bytes_are"};

void register_suite(const std::string& prefix, int devices) {
  for (const ContractCase& test : contract_cases()) {
    if (devices < 2 && std::ranges::find(kNeedTwo, std::string(test.name)) != kNeedTwo.end()) {
      std::printf("left out, there is one GPU: %s_%s\n", prefix.c_str(), test.name);
    } else {
      harness::Registrar(prefix + "_" + test.name, [test] { test.run([] { return Rig(made(), true); }); });
    }
  }
}

/// Checks for free memory before any managed allocation. If there is too little, prints a message and returns false.
bool there_is_room() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::printf("there is no GPU\n");
    return false;
  }
  for (int device = 0; device < count; ++device) {
    std::size_t free = 0, total = 0;
    if (cudaSetDevice(device) != cudaSuccess || cudaMemGetInfo(&free, &total) != cudaSuccess || free < kRoom * kLimit) {
      std::printf("not safe to run: device %d has %zu bytes free, and %zu are needed\n", device, free, kRoom * kLimit);
      return false;
    }
  }
  return cudaSetDevice(0) == cudaSuccess;
}

} // namespace

TEST(the_limit_is_not_exceeded) {
  const auto runtime = made();
  CHECK_THROWS(OutOfMemory, runtime->allocate_managed(kLimit + 1, kDevice));
  CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
  void* const kept = runtime->allocate_managed(kLimit / 2, kDevice);
  CHECK_THROWS(OutOfMemory, runtime->allocate_managed(kLimit / 2 + 1, kDevice));
  runtime->free_managed(kept);
  CHECK_EQ(runtime->managed_bytes(), std::size_t{0});
  CHECK(runtime->peak_managed_bytes() <= kLimit);
}

TEST(host_and_device_can_use_the_memory) {
  const auto runtime = made();
  auto* const bytes = static_cast<unsigned char*>(runtime->allocate_managed(8 * MiB, kDevice));
  runtime->prefetch(bytes, 8 * MiB, kDevice, kStream);
  CHECK(cudaMemset(bytes, 7, 8 * MiB) == cudaSuccess);
  runtime->synchronize_device(0);
  CHECK(bytes[0] == 7 && bytes[8 * MiB - 1] == 7);
  bytes[1] = 9;
  unsigned char back = 0;
  CHECK(cudaMemcpy(&back, bytes + 1, 1, cudaMemcpyDefault) == cudaSuccess);
  CHECK_EQ(static_cast<int>(back), 9);
  runtime->free_managed(bytes);
}

int main(int argc, char** argv) {
  if (!there_is_room()) {
    return 2;
  }
  int devices = 0;
  cudaGetDeviceCount(&devices);
  register_suite("managed", devices);
  return harness::run(argc, argv);
}
