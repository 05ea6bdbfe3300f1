// Managed memory from a memory pool of the driver (CUDA 13), instead of by cudaMallocManaged.
//
// - One pool for all homes: its largest size then is the limit of managed bytes, so that the driver, too, refuses
//   what would overrun it. A pool's size is fixed when it is made: where the limit has changed, or what
//   earlier pools had taken of it is free again, an allocation makes another pool, as large as the limit less what
//   the others still hold; an earlier pool goes with its last allocation.
// - Nothing is kept (release threshold 0): caching is the allocator's business above, and what it gives back is to
//   be free.
// - The pool's calls are stream-ordered, ours are not: memory is waited for before it is handed out, and work of
//   every device before it is given back.
//
// Only CudaRuntime::do_allocate_managed calls this, after the limit and the host's memory were checked.
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
  /// \throws RuntimeFailure naming what is missing: CUDA 13, a driver for it, or pools of the devices
  explicit PoolSource(int devices);
  ~PoolSource();
  PoolSource(const PoolSource&) = delete;
  PoolSource& operator=(const PoolSource&) = delete;

  /// On the current device. \param limit of managed bytes, of this moment; nullopt: the system's
  /// \throws OutOfMemory; RuntimeFailure also for memory that is not aligned as segments must be
  void* allocate(std::size_t bytes, std::optional<std::size_t> limit);
  void free(void* ptr) noexcept;

  // Held across a fork.
  std::mutex& mutex() {
    return mutex_;
  }

 private:
  struct Pool {
    std::optional<std::size_t> limit; ///< it was made for
    std::size_t bytes = 0; ///< the most it may hold; 0: the system's
    std::size_t allocations = 0;
  };
  cudaMemPool_t pool_for(std::size_t bytes, std::optional<std::size_t> limit);
  cudaStream_t stream_of_current_device();
  void release(cudaMemPool_t pool) noexcept;

  const int devices_;
  std::mutex mutex_; // held while the driver is called: before no other lock of ours
  std::map<cudaMemPool_t, Pool> pools_;
  cudaMemPool_t newest_ = nullptr;
  std::unordered_map<void*, cudaMemPool_t> made_from_;
  std::vector<cudaStream_t> streams_; ///< by device, made when first needed
};

} // namespace torch_uvm::cuda
