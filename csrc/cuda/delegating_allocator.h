// PyTorch's CUDA allocator while torch_uvm is installed. Delegates every call to the native allocator that it replaced,
// unless managed allocation is on for the calling thread.
//
// Native and managed memory coexist: a block's deleter returns it to its own allocator. A graph capture or a MemPool
// takes precedence over the switch: pointers in a graph must never move, and the pool was asked for explicitly.
//
// A build supports one minor version of torch, because the virtual functions of CUDAAllocator change. A virtual
// function with a default implementation that is not forwarded would compile and misbehave silently;
// scripts/audit_cuda_allocator.py finds those.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>
#include <torch/version.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define TORCH_UVM_TORCH_AT_LEAST(minor) \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= (minor)))

namespace torch_uvm::cuda {

namespace pytorch = c10::cuda::CUDACachingAllocator;

/// Which allocations PyTorch routes to a pool, those of a graph capture or of a MemPool scope: the active filters,
/// maintained by beginAllocateToPool and endAllocateToPool. Without any, which is the common case, a query costs one
/// relaxed load.
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

/// Leaked on purpose: a storage keeps a raw pointer to its allocator.
class DelegatingAllocator final : public pytorch::CUDAAllocator {
 public:
  explicit DelegatingAllocator(pytorch::CUDAAllocator* before) : native_(before) {}

  // --- allocation: managed or native, depending on the switch
  c10::DataPtr allocate(std::size_t bytes) override;
  void* raw_alloc(std::size_t bytes) override;
  void* raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) override;

  // --- functions that depend on which allocator owns the memory
  void raw_delete(void* ptr) override;
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  void* getBaseAllocation(void* ptr, std::size_t* size) override;
  pytorch::ShareableHandle shareIpcHandle(void* ptr) override;
#if TORCH_UVM_TORCH_AT_LEAST(12)
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* ptr) override;
#endif
#if TORCH_UVM_TORCH_AT_LEAST(14)
  void annotateMemory(const void* ptr, const std::string& metadata) override;
#endif

  /// Whether the calling thread's current stream is being captured into a graph. One relaxed load if no pool filter is
  /// active, as outside of captures.
  bool is_capturing_now() const;

  // --- functions that combine both allocators
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  pytorch::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  pytorch::SnapshotInfo snapshot(c10::MempoolId_t pool = {0, 0}, bool include_traces = true) override;
  void attachOutOfMemoryObserver(pytorch::OutOfMemoryObserver observer) override;
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override;

  // --- functions that only forward to the native allocator
  // Forwarded because callers depend on the native values: cudagraph trees compare the deleter, and name() decides
  // about expandable segments.
  std::string name() override {
    return native_->name();
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return native_->raw_deleter();
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return native_->is_simple_data_ptr(data);
  }
  void copy_data(void* dst, const void* src, std::size_t count) const override {
    native_->copy_data(dst, src, count);
  }
  bool initialized() override {
    return native_->initialized();
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return native_->getMemoryInfo(device);
  }
  void init(int device_count) override {
    native_->init(device_count);
  }
  double getMemoryFraction(c10::DeviceIndex device) override {
    return native_->getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    native_->setMemoryFraction(fraction, device);
  }
  std::vector<pytorch::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override {
    return native_->getExpandableSegmentSizes(device);
  }
  void enable(bool value) override {
    native_->enable(value);
  }
  bool isEnabled() const override {
    return native_->isEnabled();
  }
  // cudnn.benchmark asks how large a workspace may be. Its workspaces are temporary, so the native answer will do.
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest_block) override {
    native_->cacheInfo(device, largest_block);
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    native_->releasePool(device, pool);
  }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return native_->getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<pytorch::CUDAAllocator> allocator = nullptr) override {
    native_->createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override {
    native_->setUseOnOOM(device, pool, use_on_oom);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    native_->setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return native_->checkPoolLiveAllocations(device, pool, expected);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native_->getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override {
    return native_->isHistoryEnabled();
  }
  void recordHistory(bool enabled, pytorch::CreateContextFn context_recorder, std::size_t max_entries,
                     pytorch::RecordContext when, bool clear, const std::vector<std::string>& skip_actions) override {
    native_->recordHistory(enabled, context_recorder, max_entries, when, clear, skip_actions);
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    native_->recordAnnotation(metadata);
  }
  void pushCompileContext(std::string& metadata) override {
    native_->pushCompileContext(metadata);
  }
  void popCompileContext() override {
    native_->popCompileContext();
  }
  void setUserMetadata(const std::string& metadata) override {
    native_->setUserMetadata(metadata);
  }
  std::string getUserMetadata() override {
    return native_->getUserMetadata();
  }
  void attachAllocatorTraceTracker(pytorch::AllocatorTraceTracker tracker) override {
    native_->attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override {
    native_->enablePeerAccess(device, peer);
  }
  cudaError_t memcpyAsync(void* dst, int dst_device, const void* src, int src_device, std::size_t count,
                          cudaStream_t stream, bool p2p_enabled) override {
    return native_->memcpyAsync(dst, dst_device, src, src_device, count, stream, p2p_enabled);
  }
  std::shared_ptr<pytorch::AllocatorState> getCheckpointState(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return native_->getCheckpointState(device, pool);
  }
  pytorch::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                                  std::shared_ptr<pytorch::AllocatorState> state) override {
    return native_->setCheckpointPoolState(device, std::move(state));
  }
#if TORCH_UVM_TORCH_AT_LEAST(12)
  void attachOomRejectionObserver(pytorch::OomRejectionObserver observer) override {
    native_->attachOomRejectionObserver(std::move(observer));
  }
#endif
#if TORCH_UVM_TORCH_AT_LEAST(13)
  void markCaptureBegin(c10::DeviceIndex device) override {
    native_->markCaptureBegin(device);
  }
  void markCaptureEnd(c10::DeviceIndex device) override {
    native_->markCaptureEnd(device);
  }
  c10::DataPtr allocateWithAddress(std::size_t size, void* address) override {
    return native_->allocateWithAddress(size, address);
  }
#endif
#if TORCH_UVM_TORCH_AT_LEAST(14)
  bool supportsUserMetadata() override {
    return native_->supportsUserMetadata();
  }
#endif

 private:
  /// Whether neither a pool nor a capture claims an allocation on `stream`.
  bool switch_wins(c10::DeviceIndex device, cudaStream_t stream);
  c10::DataPtr allocate_managed_on(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream);
  /// Calls `allocate`. If the device is out of memory, the automatic budget gives memory back, and it is tried again.
  template <typename Allocate>
  auto allocate_natively(std::size_t bytes, Allocate allocate);
  /// After a native allocation: the automatic budget follows what is free.
  void note_native(c10::DeviceIndex device);

  pytorch::CUDAAllocator* const native_;
  PoolFilters filters_;
  std::mutex observers_mutex_; // leaf
  std::vector<pytorch::OutOfMemoryObserver> observers_;
};

} // namespace torch_uvm::cuda
