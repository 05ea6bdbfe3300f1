#include "emulated/memory.h"

#include <c10/util/Exception.h>

#include <optional>
#include <utility>

#include "emulated/backend.h"
#include "runtime/error.h"
#include "tensor/process/context.h"
#include "tensor/process/switch.h"
#include "tensor/storage/device_statistics.h"
#include "tensor/storage/host_tensors.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm::emulated {
namespace {

thread_local int kernel_device = kOrdinary; // the device of this thread's AllocationScope

std::optional<c10::DataPtr> allocate_for_kernel(std::size_t bytes) {
  if (kernel_device == kOrdinary) {
    return std::nullopt;
  }
  c10::DataPtr data = emulated::allocate(kernel_device, bytes);
  if (data.get() != nullptr) {
    // To reuse a block, the allocator may have made the stream wait for another stream. The kernel is already running,
    // so that wait has to happen now.
    runtime().wait_in_kernel(current_stream(kernel_device));
  }
  return data;
}

struct EmuAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    return emulated::allocate(current_device(), bytes);
  }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override {
    const Stream stream = current_stream(current_device());
    runtime().copy_async(dst, src, bytes, stream);
  }
  bool initialized() override {
    return Context::get().in_use();
  }
  void emptyCache(c10::MempoolId_t /*pool*/) override {
    plain_allocator().empty_cache();
    Context::get().managed_allocator().empty_cache();
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, from_torch(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Location home = Location::device(checked_index(index));
    c10::CachingDeviceAllocator::DeviceStats stats;
    add(stats, plain_allocator().statistics(home));
    add(stats, Context::get().managed_allocator().statistics(home));
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    const Location home = Location::device(checked_index(index));
    plain_allocator().reset_accumulated_statistics(home);
    Context::get().managed_allocator().reset_accumulated_statistics(home);
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    const Location home = Location::device(checked_index(index));
    plain_allocator().reset_peak_statistics(home);
    Context::get().managed_allocator().reset_peak_statistics(home);
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const MemoryInfo info = runtime().memory_info(checked_index(index));
    return {info.free, info.total};
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    try {
      void* ptr = bytes == 0 ? nullptr : runtime().allocate_pinned(bytes);
      return {ptr, ptr, &free_pinned, c10::Device(c10::DeviceType::CPU)};
    } catch (const OutOfMemory& error) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
    }
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override {
    default_copy_data(dst, src, bytes);
  }

 private:
  static void free_pinned(void* ptr) {
    runtime().free_pinned(ptr); // waits for pending copies
  }
};

} // namespace

c10::DataPtr allocate(int device, std::size_t bytes) {
  const Stream stream = current_stream(device);
  const c10::Device label(kDeviceType, static_cast<c10::DeviceIndex>(device));
  if (managed_enabled()) {
    return allocate_managed(bytes, Location::device(device), stream, label);
  }
  plain_allocator(); // created before its first use
  return allocate_plain(bytes, stream, label);
}

c10::DataPtr adopt_kernel_memory(c10::DataPtr& data, int device) {
  c10::DataPtr adopted = data_by_address(data.get(), c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)));
  if (adopted.get() != nullptr) {
    data.release_context();
  }
  return adopted;
}

c10::Allocator* device_allocator() {
  static auto* allocator = new EmuAllocator(); // leaked: storages keep raw pointers to it
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* allocator = new PinnedAllocator(); // leaked: storages keep raw pointers to it
  return allocator;
}

void install_cpu_allocator() {
  install_host_tensors(&allocate_for_kernel);
}

AllocationScope::AllocationScope(int device) : previous_(std::exchange(kernel_device, device)) {}
AllocationScope::~AllocationScope() {
  kernel_device = previous_;
}

} // namespace torch_uvm::emulated
