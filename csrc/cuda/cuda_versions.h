// Wrappers for the differences between CUDA runtime versions.
//
// In CUDA 13 prefetch and advise take a cudaMemLocation. A build against 12.x also runs on drivers without batch calls.
#pragma once

#include <cuda_runtime_api.h>

#include "runtime/location.h"

namespace torch_uvm::cuda {

#if CUDART_VERSION >= 13000

inline cudaMemLocation to_cuda(Location location) {
  cudaMemLocation where{};
  where.type = location.is_host() ? cudaMemLocationTypeHost : cudaMemLocationTypeDevice;
  where.id = location.is_host() ? 0 : location.index;
  return where;
}

inline cudaError_t mem_prefetch(const void* ptr, std::size_t bytes, Location to, cudaStream_t stream) {
  return cudaMemPrefetchAsync(ptr, bytes, to_cuda(to), /*flags=*/0, stream);
}

inline cudaError_t mem_advise(const void* ptr, std::size_t bytes, cudaMemoryAdvise advice, Location location) {
  return cudaMemAdvise(ptr, bytes, advice, to_cuda(location));
}

/// Whether mem_discard and make_managed_pool are supported.
constexpr bool kCanDiscard = true;
constexpr bool kManagedPools = true;

/// Discards the contents and prefetches the pages to `next`. Never discard alone: on an H200 (driver 580, CUDA 13.0),
/// cudaMemDiscardBatchAsync behind pending work takes effect some milliseconds *after* its stream, and even the device,
/// was synchronised. It then also discards what the host has written since.
inline cudaError_t mem_discard(void* ptr, std::size_t bytes, Location next, cudaStream_t stream) {
  cudaMemLocation where = to_cuda(next);
  std::size_t first = 0;
  return cudaMemDiscardAndPrefetchBatchAsync(&ptr, &bytes, 1, &where, &first, 1, /*flags=*/0, stream);
}

/// Creates a pool of managed memory without preferred location, like memory of cudaMallocManaged. The driver of CUDA
/// 13.0 rejects a maximum size for such a pool. The pool is then created without one, and only
/// ManagedRuntime::allocate_managed enforces the limit.
inline cudaError_t make_managed_pool(cudaMemPool_t* pool, std::size_t max_bytes) {
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypeManaged;
  properties.location.type = cudaMemLocationTypeNone;
  properties.maxSize = max_bytes;
  const cudaError_t status = cudaMemPoolCreate(pool, &properties);
  if (status != cudaErrorInvalidValue || max_bytes == 0) {
    return status;
  }
  cudaGetLastError();
  properties.maxSize = 0;
  return cudaMemPoolCreate(pool, &properties);
}

#else

inline int to_cuda(Location location) {
  return location.is_host() ? cudaCpuDeviceId : location.index;
}

inline cudaError_t mem_prefetch(const void* ptr, std::size_t bytes, Location to, cudaStream_t stream) {
  return cudaMemPrefetchAsync(ptr, bytes, to_cuda(to), stream);
}

inline cudaError_t mem_advise(const void* ptr, std::size_t bytes, cudaMemoryAdvise advice, Location location) {
  return cudaMemAdvise(ptr, bytes, advice, to_cuda(location));
}

constexpr bool kCanDiscard = false;
constexpr bool kManagedPools = false;

inline cudaError_t mem_discard(void* /*ptr*/, std::size_t /*bytes*/, Location /*next*/, cudaStream_t /*stream*/) {
  return cudaErrorNotSupported;
}

inline cudaError_t make_managed_pool(cudaMemPool_t* /*pool*/, std::size_t /*max_bytes*/) {
  return cudaErrorNotSupported;
}

#endif

/// Looks up a driver function by name, with the signature of CUDA `version`.
inline cudaError_t driver_function(const char* name, unsigned int version, void** function) {
#if CUDART_VERSION >= 12050
  return cudaGetDriverEntryPointByVersion(name, function, version, cudaEnableDefault, nullptr);
#else
  static_cast<void>(version);
  return cudaGetDriverEntryPoint(name, function, cudaEnableDefault, nullptr);
#endif
}

} // namespace torch_uvm::cuda
