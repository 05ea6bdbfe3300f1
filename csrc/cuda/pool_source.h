// Managed memory from a driver memory pool (CUDA 13) instead of cudaMallocManaged.
//
// - One pool serves all homes. Its maximum size is the limit of managed bytes, so that the driver enforces it as well.
// - A pool's maximum size is fixed at creation. If the limit has changed, or earlier pools have released their share of
//   it, an allocation creates a new pool, of the limit less what the other pools still hold. An earlier pool is
//   destroyed with its last allocation.
// - The pool caches nothing (release threshold 0): the allocator above does the caching, and the memory that it
//   releases has to be free for others.
// - Pool calls are stream-ordered, ours are not. An allocation waits until its memory is ready; a free first
//   synchronises all devices.
//
// Only CudaRuntime allocates from it, after the limit and the host's memory were checked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

namespace torch_uvm::cuda {

/// Thread-safe.
class PoolSource {
 public:
  /// \throws RuntimeFailure naming what is missing: CUDA 13, its driver, or a device's support of memory pools
  explicit PoolSource(int devices);
  ~PoolSource();
  PoolSource(const PoolSource&) = delete;
  PoolSource& operator=(const PoolSource&) = delete;

  /// Allocates on the current device. \param limit the current limit of managed bytes; nullopt: only the system's
  /// \throws OutOfMemory; RuntimeFailure, also if the memory does not have the alignment of segments
  void* allocate(std::size_t bytes, std::optional<std::size_t> limit);
  void free(void* ptr) noexcept;

  // For the fork handlers, which hold it across a fork.
  std::mutex& mutex() {
    return mutex_;
  }

 private:
  struct Pool {
    std::optional<std::size_t> limit; ///< the limit when the pool was created
    std::size_t bytes = 0; ///< maximum size; 0: only the system's
    std::size_t allocations = 0;
  };
  cudaMemPool_t pool_for(std::size_t bytes, std::optional<std::size_t> limit);
  cudaStream_t stream_of_current_device();
  void release(cudaMemPool_t pool) noexcept;

  const int devices_;
  std::mutex mutex_; // leaf, but driver calls are made with it held
  std::map<cudaMemPool_t, Pool> pools_;
  cudaMemPool_t newest_ = nullptr;
  std::unordered_map<void*, cudaMemPool_t> made_from_;
  std::vector<cudaStream_t> streams_; ///< by device, created at first use
};

} // namespace torch_uvm::cuda
