// All that differs between versions of the CUDA runtime, and nothing else.
//
// Compiled against 12.x a program runs on drivers that know no batch calls; against 13 the signatures of
// prefetch and advise take a cudaMemLocation. Both are hidden here.
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

/// Whether mem_discard does something, and whether pools can be of managed memory.
constexpr bool kCanDiscard = true;
constexpr bool kManagedPools = true;

/// Forgets the contents and brings the pages to `next`. Never one without the other: seen on an H200 (driver 580,
/// CUDA 13.0), cudaMemDiscardBatchAsync behind pending work forgets some milliseconds *after* its stream, and
/// even the device, has been waited for, and with it what the host has written meanwhile.
inline cudaError_t mem_discard(void* ptr, std::size_t bytes, Location next, cudaStream_t stream) {
  cudaMemLocation where = to_cuda(next);
  std::size_t first = 0;
  return cudaMemDiscardAndPrefetchBatchAsync(&ptr, &bytes, 1, &where, &first, 1, /*flags=*/0, stream);
}

/// A pool of managed memory with no preferred location, as cudaMallocManaged's has none. The driver of CUDA
/// 13.0 takes no maximum size for such a pool: it is made without one then, and the limit that
/// ManagedRuntime::allocate_managed holds is the only one.
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

/// A function of the driver, by its name and the CUDA version whose signature is meant.
inline cudaError_t driver_function(const char* name, unsigned int version, void** function) {
#if CUDART_VERSION >= 12050
  return cudaGetDriverEntryPointByVersion(name, function, version, cudaEnableDefault, nullptr);
#else
  static_cast<void>(version);
  return cudaGetDriverEntryPoint(name, function, cudaEnableDefault, nullptr);
#endif
}

} // namespace torch_uvm::cuda
