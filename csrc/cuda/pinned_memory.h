// Pinned host memory. Large allocations use huge pages, touched by several threads and then registered.
//
// cudaHostAlloc touches and pins page by page, and the first step under a budget waits for it. Copies run at the same
// rate either way. Rates on the host of an H200:
//
//   cudaHostAlloc                          0.5 to 2.9 GB/s
//   pinning huge pages already touched     30 to 50 GB/s
//   touching and pinning huge pages        10 to 20 GB/s
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>

namespace torch_uvm::cuda {

/// Thread-safe. All devices can access the memory at its host address.
class PinnedMemory {
 public:
  /// \param devices number of devices
  explicit PinnedMemory(int devices);

  /// \param available bytes that the host has left: touching more would get the process killed
  /// \throws OutOfMemory, RuntimeFailure
  void* allocate(std::size_t bytes, std::size_t available);
  /// Frees the memory after device work that may touch it. At process exit, without the driver, it is leaked.
  void free(void* ptr) noexcept;

 private:
  void* registered(std::size_t bytes, std::size_t available);
  std::size_t take_out(void* ptr) noexcept; ///< removes it from `mapped_`; returns its bytes, 0 if it was not there
  void wait_for_devices() const noexcept;

  int devices_;
  std::atomic<bool> registers_; ///< false: all memory comes from cudaHostAlloc
  std::mutex mutex_; // leaf
  std::map<void*, std::size_t> mapped_; ///< registered memory: address -> bytes
};

} // namespace torch_uvm::cuda
