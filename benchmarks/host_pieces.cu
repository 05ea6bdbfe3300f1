// What it costs to use pinned memory at the address of a device's storage: one piece of the host's memory, mapped at
// two addresses. docs/stable-addresses.md reads the figures. Plain memory only, under 512 MiB.
//   nvcc -std=c++20 -O2 -arch=sm_90 benchmarks/host_pieces.cu -lcuda -o build/host_pieces
#include <cuda.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace {

void check(CUresult status, int line) {
  if (status != CUDA_SUCCESS) {
    const char* text = nullptr;
    cuGetErrorString(status, &text);
    std::printf("line %d: %s\n", line, text);
    std::exit(1);
  }
}
void check(cudaError_t status, int line) {
  if (status != cudaSuccess) {
    std::printf("line %d: %s\n", line, cudaGetErrorString(status));
    std::exit(1);
  }
}
#define CHECK(call) check(call, __LINE__)

/// Microseconds of host time.
template <typename Call>
double us(Call call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

__global__ void add_one(float4* at, size_t count) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    float4 value = at[i];
    value.x += 1;
    at[i] = value;
  }
}
__global__ void spin(long long cycles) {
  const long long begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

cudaStream_t stream;
CUmemAllocationProp host{CU_MEM_ALLOCATION_TYPE_PINNED};
CUmemAllocationProp device{CU_MEM_ALLOCATION_TYPE_PINNED};

void give_access(CUdeviceptr range, size_t bytes, bool to_host) {
  const CUmemAccessDesc access[]{{device.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE},
                                 {host.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
  CHECK(cuMemSetAccess(range, bytes, access, to_host ? 2 : 1));
}

template <typename Work>
double rate(size_t bytes, Work work) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  CHECK(cudaEventRecord(begin, stream));
  work();
  CHECK(cudaEventRecord(end, stream));
  CHECK(cudaStreamSynchronize(stream));
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, begin, end));
  return static_cast<double>(bytes) / ms / 1e6;
}

void measure(size_t bytes) {
  constexpr long long kLong = 20'000'000; // cycles, about 10 ms
  CUmemGenericAllocationHandle piece, memory;
  CUdeviceptr own, range;
  std::printf("%zu MiB\n", bytes >> 20);
  std::printf("  create                          %8.0f us\n", us([&] { CHECK(cuMemCreate(&piece, bytes, &host, 0)); }));
  CHECK(cuMemAddressReserve(&own, bytes, 2 << 20, 0, 0));
  CHECK(cuMemAddressReserve(&range, bytes, 2 << 20, 0, 0));
  std::printf("  map for host and device         %8.0f us\n", us([&] {
                CHECK(cuMemMap(own, bytes, 0, piece, 0));
                give_access(own, bytes, true);
              }));
  const auto map_again = [&] {
    CHECK(cuMemMap(range, bytes, 0, piece, 0));
    give_access(range, bytes, false);
  };
  std::printf("  map again, for the device       %8.0f us\n", us(map_again));
  spin<<<1, 1, 0, stream>>>(kLong);
  std::printf("  unmap that beside a kernel      %8.0f us\n", us([&] { CHECK(cuMemUnmap(range, bytes)); }));
  std::printf("  map it beside a kernel          %8.0f us\n", us(map_again));
  CHECK(cudaStreamSynchronize(stream));
  static_cast<volatile float*>(reinterpret_cast<void*>(own))[0] = 3;
  std::printf("  read and write in place         %8.1f GB/s each way\n", rate(4 * bytes, [&] {
                for (int round = 0; round < 4; ++round) {
                  add_one<<<528, 512, 0, stream>>>(reinterpret_cast<float4*>(range), bytes / sizeof(float4));
                }
              }));
  std::printf("  the host sees                   %8.0f (7)\n", reinterpret_cast<float*>(own)[0]);
  CHECK(cuMemUnmap(range, bytes));
  CHECK(cuMemCreate(&memory, bytes, &device, 0));
  CHECK(cuMemMap(range, bytes, 0, memory, 0));
  give_access(range, bytes, false);
  const auto copy = [&](CUdeviceptr to, CUdeviceptr from) {
    CHECK(
        cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes, cudaMemcpyDefault, stream));
  };
  spin<<<1, 1, 0, stream>>>(kLong);
  std::printf("  call of a copy behind a kernel  %8.0f us\n", us([&] { copy(range, own); }));
  CHECK(cudaStreamSynchronize(stream));
  std::printf("  copy to the device              %8.1f GB/s\n", rate(bytes, [&] { copy(range, own); }));
  std::printf("  copy to the host                %8.1f GB/s\n", rate(bytes, [&] { copy(own, range); }));
  CHECK(cuMemUnmap(range, bytes));
  CHECK(cuMemRelease(memory));
  std::printf("  unmap for host and device       %8.0f us\n", us([&] { CHECK(cuMemUnmap(own, bytes)); }));
  std::printf("  release                         %8.0f us\n", us([&] { CHECK(cuMemRelease(piece)); }));
  CHECK(cuMemAddressFree(own, bytes));
  CHECK(cuMemAddressFree(range, bytes));
}

} // namespace

int main() {
  CHECK(cudaFree(nullptr));
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  int node = 0, supported = 0;
  CHECK(cuDeviceGetAttribute(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, 0));
  CHECK(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0));
  std::printf("host memory can be mapped: %s, NUMA node %d\n", supported != 0 ? "yes" : "no", node);
  host.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, node < 0 ? 0 : node};
  device.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  for (const size_t mib : {2, 8, 32, 128}) {
    measure(mib << 20);
  }
  for (const size_t mib : {32, 128}) {
    void* pinned = nullptr;
    const double took = us([&] { CHECK(cudaHostAlloc(&pinned, mib << 20, cudaHostAllocDefault)); });
    std::printf("cudaHostAlloc of %zu MiB, for comparison: %.0f us\n", mib, took);
    CHECK(cudaFreeHost(pinned));
  }
  std::printf("done\n");
}
