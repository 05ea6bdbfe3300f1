#include "emulated/memory.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

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

c10::DeleterFnPtr native_deleter = nullptr; // of the CPU allocator that ours replaced

// Deleter of kernel memory. c10::Allocator::raw_allocate, which oneDNN uses for scratch memory, demands that an
// allocation's context is its address and its deleter is the allocator's raw_deleter(). So kernel memory has these, and
// its real context and deleter are looked up by address.
void delete_cpu_memory(void* ptr) {
  const c10::DataPtr freed = data_by_address(ptr, c10::Device(c10::DeviceType::CPU)); // its destructor frees the memory
  if (freed.get() == nullptr && native_deleter != nullptr) {
    native_deleter(ptr);
  }
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

struct DelegatingCpuAllocator final : c10::Allocator {
  explicit DelegatingCpuAllocator(c10::Allocator* native) : native(native) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (kernel_device == kOrdinary) {
      return native->allocate(bytes);
    }
    c10::DataPtr data = emulated::allocate(kernel_device, bytes);
    void* ptr = data.get();
    if (ptr != nullptr) {
      // To reuse a block, the allocator may have made the stream wait for another stream. The kernel is already
      // running, so that wait has to happen now.
      runtime().wait_in_kernel(current_stream(kernel_device));
      data.release_context();
    }
    return {ptr, ptr, &delete_cpu_memory, c10::Device(c10::DeviceType::CPU)};
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return native->is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_cpu_memory; // for ordinary memory too; the deleter tells the two apart
  }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override {
    native->copy_data(dst, src, bytes);
  }

  c10::Allocator* const native;
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

bool is_kernel_memory(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_cpu_memory;
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
  install_host_tensors(); // first, so that ours delegates to it and large kernel memory stays the device's
  native_deleter = c10::GetCPUAllocator()->raw_deleter();
  static auto* allocator = new DelegatingCpuAllocator(c10::GetCPUAllocator()); // leaked: never uninstalled
  c10::SetCPUAllocator(allocator, /*priority=*/1);
}

AllocationScope::AllocationScope(int device) : previous_(std::exchange(kernel_device, device)) {}
AllocationScope::~AllocationScope() {
  kernel_device = previous_;
}

} // namespace torch_uvm::emulated
