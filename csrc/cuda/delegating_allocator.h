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

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/version.h>

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda/pool_filters.h"

#define TORCH_UVM_TORCH_AT_LEAST(minor) \
  (TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= (minor)))

namespace torch_uvm::cuda {

namespace pytorch = c10::cuda::CUDACachingAllocator;

/// Leaked on purpose: a storage keeps a raw pointer to its allocator.
class DelegatingAllocator final : public pytorch::CUDAAllocator {
 public:
  explicit DelegatingAllocator(pytorch::CUDAAllocator* before) : native_(before) {}

  // --- allocation: managed or native, depending on the switch (delegating_allocator.cpp)
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

  // --- functions that only forward to the native allocator (forwarding.cpp)
  bool is_simple_data_ptr(const c10::DataPtr& data) const override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* dst, const void* src, std::size_t count) const override;
  bool initialized() override;
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override;
  void init(int device_count) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;
  std::vector<pytorch::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex device) override;
  void enable(bool value) override;
  bool isEnabled() const override;
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest_block) override;
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<pytorch::CUDAAllocator> allocator = nullptr) override;
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override;
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override;
  bool isHistoryEnabled() override;
  void recordHistory(bool enabled, pytorch::CreateContextFn context_recorder, std::size_t max_entries,
                     pytorch::RecordContext when, bool clear, const std::vector<std::string>& skip_actions) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override;
  void pushCompileContext(std::string& metadata) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override;
  std::string getUserMetadata() override;
  void attachAllocatorTraceTracker(pytorch::AllocatorTraceTracker tracker) override;
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex peer) override;
  cudaError_t memcpyAsync(void* dst, int dst_device, const void* src, int src_device, std::size_t count,
                          cudaStream_t stream, bool p2p_enabled) override;
  std::shared_ptr<pytorch::AllocatorState> getCheckpointState(c10::DeviceIndex device, c10::MempoolId_t pool) override;
  pytorch::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                                  std::shared_ptr<pytorch::AllocatorState> state) override;
  std::string name() override;
#if TORCH_UVM_TORCH_AT_LEAST(12)
  void attachOomRejectionObserver(pytorch::OomRejectionObserver observer) override;
#endif
#if TORCH_UVM_TORCH_AT_LEAST(13)
  void markCaptureBegin(c10::DeviceIndex device) override;
  void markCaptureEnd(c10::DeviceIndex device) override;
  c10::DataPtr allocateWithAddress(std::size_t size, void* address) override;
#endif
#if TORCH_UVM_TORCH_AT_LEAST(14)
  bool supportsUserMetadata() override;
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
