// Pinned host memory, of large pages where there is much of it.
//
// cudaHostAlloc touches and pins page by page, at 0.5 to 2.9 GB/s on an H200's host: a first step under a budget
// waits for that. Large pages that a few threads of the host have touched are pinned at 30 to 50 GB/s, both together
// take 10 to 20 GB/s, and copies run at the same rate (benchmarks/pinning.py).
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>

namespace torch_uvm::cuda {

/// Thread-safe. Every device can use it where it lies, at the host's address.
class PinnedMemory {
 public:
  /// \param devices how many there are
  explicit PinnedMemory(int devices);

  /// \param available bytes that the host could still give: touching more would end the process
  /// \throws OutOfMemory, RuntimeFailure
  void* allocate(std::size_t bytes, std::size_t available);
  /// After the work that may touch it. At exit, when the driver is gone, it stays.
  void free(void* ptr) noexcept;

 private:
  void* registered(std::size_t bytes, std::size_t available);
  std::size_t take_out(void* ptr) noexcept; ///< its bytes; 0: it was not registered
  void wait_for_devices() const noexcept;

  int devices_;
  std::atomic<bool> registers_; ///< else it is all cudaHostAlloc's
  std::mutex mutex_; // leaf
  std::map<void*, std::size_t> mapped_; ///< what was registered: address -> bytes
};

} // namespace torch_uvm::cuda
