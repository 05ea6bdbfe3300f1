// Tracks which allocations PyTorch routes to a pool: those of a graph capture or of a MemPool scope.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

namespace torch_uvm::cuda {

/// The active filters, maintained by beginAllocateToPool and endAllocateToPool. Without any, which is the common case,
/// a query costs one relaxed load.
class PoolFilters {
 public:
  using Filter = std::function<bool(cudaStream_t)>;

  void begin(c10::DeviceIndex device, c10::MempoolId_t pool, Filter filter) {
    const std::lock_guard lock(mutex_);
    entries_.push_back({device, pool, std::move(filter)});
    count_.store(entries_.size(), std::memory_order_relaxed);
  }

  void end(c10::DeviceIndex device, c10::MempoolId_t pool) {
    const std::lock_guard lock(mutex_);
    for (auto entry = entries_.rbegin(); entry != entries_.rend(); ++entry) {
      if (entry->device == device && entry->pool == pool) {
        entries_.erase(std::next(entry).base());
        break;
      }
    }
    count_.store(entries_.size(), std::memory_order_relaxed);
  }

  /// Whether any filter is active. One is during every capture by PyTorch.
  bool any() const {
    return count_.load(std::memory_order_relaxed) != 0;
  }

  bool any_takes(c10::DeviceIndex device, cudaStream_t stream) {
    if (count_.load(std::memory_order_relaxed) == 0) {
      return false;
    }
    const std::lock_guard lock(mutex_); // held while filters run, as in the native allocator: filters do not allocate
    for (const Entry& entry : entries_) {
      if (entry.device == device && entry.filter(stream)) {
        return true;
      }
    }
    return false;
  }

 private:
  struct Entry {
    c10::DeviceIndex device;
    c10::MempoolId_t pool;
    Filter filter;
  };

  std::atomic<std::size_t> count_{0};
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

} // namespace torch_uvm::cuda
