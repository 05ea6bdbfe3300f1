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

constexpr bool kCanDiscard = true; ///< whether mem_discard is supported

/// Discards the contents and prefetches the pages to `next`. Never discard alone: on an H200 (driver 580, CUDA 13.0),
/// cudaMemDiscardBatchAsync behind pending work takes effect some milliseconds *after* its stream, and even the device,
/// was synchronised. It then also discards what the host has written since.
inline cudaError_t mem_discard(void* ptr, std::size_t bytes, Location next, cudaStream_t stream) {
  cudaMemLocation where = to_cuda(next);
  std::size_t first = 0;
  return cudaMemDiscardAndPrefetchBatchAsync(&ptr, &bytes, 1, &where, &first, 1, /*flags=*/0, stream);
}

#else

inline int to_cuda(Location location) {
  return location.is_host() ? cudaCpuDeviceId : location.index;
}

inline cudaError_t mem_prefetch(const void* ptr, std::size_t bytes, Location to, cudaStream_t stream) {
  return cudaMemPrefetchAsync(ptr, bytes, to_cuda(to), stream);
}

constexpr bool kCanDiscard = false;

inline cudaError_t mem_discard(void* /*ptr*/, std::size_t /*bytes*/, Location /*next*/, cudaStream_t /*stream*/) {
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
