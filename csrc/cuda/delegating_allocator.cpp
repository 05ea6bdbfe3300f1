// The functions of DelegatingAllocator that do more than forward.
#include "cuda/delegating_allocator.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>

#include "cuda/cuda_calls.h"
#include "cuda/workspaces.h"
#include "runtime/error.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/switch.h"
#include "tensor/storage/device_statistics.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm::cuda {
namespace {

using c10::cuda::current_device;

Block* managed_block_at(const void* ptr) {
  CachingManagedAllocator* allocator = Context::get().allocator_in_use();
  return allocator == nullptr || ptr == nullptr ? nullptr : allocator->find(ptr);
}

/// Calls the out-of-memory observers. Call with no lock held, as observers may run any code.
void tell(const std::vector<pytorch::OutOfMemoryObserver>& observers, c10::DeviceIndex device, std::size_t bytes) {
  if (observers.empty()) {
    return;
  }
  MemoryInfo card;
  try {
    card = Context::get().runtime().memory_info(device);
  } catch (const RuntimeFailure&) {
    // Report the out-of-memory error all the same, without the device's figures.
  }
  for (const auto& observer : observers) {
    observer(device, bytes, card.total, card.free);
  }
}

/// This thread's count of native allocations, to detect whether one happened in between.
thread_local std::uint64_t native_allocations = 0;

/// Whether managed memory has room for a block without evicting anything.
bool has_room(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
  try {
    CachingManagedAllocator& allocator = Context::get().managed_allocator();
    Block* const block = allocator.try_allocate(bytes, Location::device(device), Stream{device, stream});
    allocator.free(block);
    return block != nullptr;
  } catch (const std::exception&) {
    return true; // the actual allocation will report the error
  }
}

} // namespace

bool DelegatingAllocator::switch_wins(c10::DeviceIndex device, cudaStream_t stream) {
  // Skip the query for the default stream, which cannot be captured: most allocations are for it, and the query would
  // take as long as the rest of the allocation.
  return !filters_.any_takes(device, stream) && (stream == nullptr || !is_capturing(stream));
}

c10::DataPtr DelegatingAllocator::allocate_managed_on(c10::DeviceIndex device, std::size_t bytes, cudaStream_t stream) {
  const Location home = Location::device(device);
  try {
    return allocate_managed(bytes, home, Stream{device, stream}, c10::Device(c10::DeviceType::CUDA, device));
  } catch (const c10::OutOfMemoryError&) {
    std::vector<pytorch::OutOfMemoryObserver> observers;
    {
      const std::lock_guard lock(observers_mutex_);
      observers = observers_;
    }
    tell(observers, device, bytes);
    throw;
  }
}

template <typename Allocate>
auto DelegatingAllocator::allocate_natively(std::size_t bytes, Allocate allocate) {
  // A capture forbids waiting for the device, which giving memory back may need.
  return is_capturing_now() ? allocate() : with_fitted_budget([] { return int{current_device()}; }, bytes, allocate);
}

void DelegatingAllocator::note_native(c10::DeviceIndex device) {
  if (!is_capturing_now()) {
    look_at_budget(device);
  }
}

c10::DataPtr DelegatingAllocator::allocate(std::size_t bytes) {
  if (managed_enabled() && !Context::get().forked()) { // the only overhead while the switch is off
    const c10::DeviceIndex device = current_device();
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device).stream();
    if (switch_wins(device, stream)) {
      const std::uint64_t before = native_allocations;
      reserve_workspaces(device, bytes, stream);
      // If a workspace was just allocated natively, this request is most likely for the same workspace, and PyTorch
      // will free it at once. Do not evict anything for it or exceed a budget: without room, allocate it natively.
      if (native_allocations == before || has_room(device, bytes, stream)) {
        return allocate_managed_on(device, bytes, stream);
      }
    }
  }
  ++native_allocations;
  c10::DataPtr data = allocate_natively(bytes, [&] { return native_->allocate(bytes); });
  if (bytes != 0) {
    note_native(data.device().index());
  }
  return data;
}

void* DelegatingAllocator::raw_alloc(std::size_t bytes) {
  return bytes == 0 ? nullptr
                    : raw_alloc_with_stream(bytes, c10::cuda::getCurrentCUDAStream(current_device()).stream());
}

void* DelegatingAllocator::raw_alloc_with_stream(std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) {
    return native_->raw_alloc_with_stream(bytes, stream);
  }
  const c10::DeviceIndex device = current_device();
  if (managed_enabled() && !Context::get().forked() && switch_wins(device, stream)) {
    c10::DataPtr data = allocate_managed_on(device, bytes, stream);
    void* ptr = data.get();
    data.release_context(); // raw_delete finds the block by its address
    return ptr;
  }
  void* ptr = allocate_natively(bytes, [&] { return native_->raw_alloc_with_stream(bytes, stream); });
  note_native(device);
  return ptr;
}

void DelegatingAllocator::raw_delete(void* ptr) {
  if (c10::DataPtr data = data_by_address(ptr, c10::Device(c10::DeviceType::CUDA))) {
    return; // the DataPtr's destructor frees it
  }
  native_->raw_delete(ptr);
}

void DelegatingAllocator::recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) {
  if (is_managed(data)) {
    record_stream(data, Stream{stream.device_index(), stream.stream()});
  } else {
    native_->recordStream(data, stream);
  }
}

void DelegatingAllocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  recordStream(data, c10::cuda::CUDAStream(stream));
}

void* DelegatingAllocator::getBaseAllocation(void* ptr, std::size_t* size) {
  TORCH_CHECK(managed_block_at(ptr) == nullptr,
              "managed memory has no base allocation that another process could open: send a copy in ordinary memory, "
              "t.to(t.device, managed=False)");
  return native_->getBaseAllocation(ptr, size);
}

pytorch::ShareableHandle DelegatingAllocator::shareIpcHandle(void* ptr) {
  TORCH_CHECK(managed_block_at(ptr) == nullptr,
              "CUDA has no IPC handles for managed memory: send a copy in ordinary memory, "
              "t.to(t.device, managed=False)");
  return native_->shareIpcHandle(ptr);
}

#if TORCH_UVM_TORCH_AT_LEAST(12)
std::shared_ptr<c10::GatheredContext> DelegatingAllocator::getContextForPointer(const void* ptr) {
  return managed_block_at(ptr) != nullptr ? nullptr : native_->getContextForPointer(ptr);
}
#endif

#if TORCH_UVM_TORCH_AT_LEAST(14)
void DelegatingAllocator::annotateMemory(const void* ptr, const std::string& metadata) {
  if (managed_block_at(ptr) == nullptr) { // native traces do not contain managed memory
    native_->annotateMemory(ptr, metadata);
  }
}
#endif

void DelegatingAllocator::emptyCache(c10::MempoolId_t pool) {
  native_->emptyCache(pool);
  CachingManagedAllocator* managed = Context::get().allocator_in_use();
  if (managed != nullptr && pool == c10::MempoolId_t{0, 0}) {
    managed->empty_cache();
  }
}

pytorch::DeviceStats DelegatingAllocator::getDeviceStats(c10::DeviceIndex device) {
  pytorch::DeviceStats stats = native_->getDeviceStats(device);
  if (CachingManagedAllocator* managed = Context::get().allocator_in_use()) {
    add(stats, managed->statistics(Location::device(device)));
  }
  return stats;
}

void DelegatingAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  native_->resetAccumulatedStats(device);
  if (CachingManagedAllocator* managed = Context::get().allocator_in_use()) {
    managed->reset_accumulated_statistics(Location::device(device));
  }
}

void DelegatingAllocator::resetPeakStats(c10::DeviceIndex device) {
  native_->resetPeakStats(device);
  if (CachingManagedAllocator* managed = Context::get().allocator_in_use()) {
    managed->reset_peak_statistics(Location::device(device));
  }
}

pytorch::SnapshotInfo DelegatingAllocator::snapshot(c10::MempoolId_t pool, bool include_traces) {
  pytorch::SnapshotInfo info = native_->snapshot(pool, include_traces);
  CachingManagedAllocator* managed = Context::get().allocator_in_use();
  if (managed == nullptr || pool != c10::MempoolId_t{0, 0}) {
    return info;
  }
  for (const SegmentInfo& segment : managed->snapshot()) {
    if (segment.home.is_host()) {
      continue; // not a device's segment; torch_uvm.memory.memory_snapshot() reports those as well
    }
    pytorch::SegmentInfo& described = info.segments.emplace_back();
    described.device = static_cast<c10::DeviceIndex>(segment.home.index);
    described.address = segment.address;
    described.total_size = segment.bytes;
    described.requested_size = segment.requested_bytes;
    described.allocated_size = segment.allocated_bytes;
    described.active_size = segment.active_bytes;
    described.is_large = segment.kind != PoolKind::kSmall;
    for (const BlockInfo& block : segment.blocks) {
      pytorch::BlockInfo& piece = described.blocks.emplace_back();
      piece.size = block.bytes;
      piece.requested_size = block.requested_bytes;
      piece.allocated = block.state == BlockInfo::State::kAllocated;
      piece.active = block.state != BlockInfo::State::kFree;
    }
    if (!segment.blocks.empty()) {
      described.stream = segment.blocks.front().stream.handle;
    }
  }
  std::ranges::sort(info.segments, {}, &pytorch::SegmentInfo::address); // the order of native snapshots
  return info;
}

void DelegatingAllocator::attachOutOfMemoryObserver(pytorch::OutOfMemoryObserver observer) {
  {
    const std::lock_guard lock(observers_mutex_);
    observers_.push_back(observer);
  }
  native_->attachOutOfMemoryObserver(std::move(observer));
}

bool DelegatingAllocator::is_capturing_now() const {
  return filters_.any() && is_capturing(c10::cuda::getCurrentCUDAStream().stream());
}

void DelegatingAllocator::beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                                              std::function<bool(cudaStream_t)> filter) {
  native_->beginAllocateToPool(device, pool, filter);
  filters_.begin(device, pool, std::move(filter));
}

void DelegatingAllocator::endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) {
  filters_.end(device, pool);
  native_->endAllocateToPool(device, pool);
}

} // namespace torch_uvm::cuda
