#include "emulated/backend.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <utility>

#include "tensor/process/context.h"
#include "tensor/storage/block_storage.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm::emulated {
namespace {

std::atomic<EmulatedRuntime*> the_runtime{nullptr};

thread_local int thread_device = 0;
// The current stream's handle of each device; null is the default stream.
thread_local std::array<void*, kMaxDevices> thread_streams{};

} // namespace

std::unique_ptr<ManagedRuntime> make_emulated_runtime(const Options& options) {
  auto made = std::make_unique<EmulatedRuntime>(options.emulated);
  the_runtime.store(made.get(), std::memory_order_release);
  // Registered before the allocators' handlers: prepare handlers run in reverse order, so the allocators' locks are
  // taken first, as the lock order demands.
  pthread_atfork([] { the_runtime.load()->before_fork(); }, [] { the_runtime.load()->after_fork_in_parent(); },
                 [] { the_runtime.load()->after_fork_in_child(); });
  return made;
}

EmulatedRuntime& runtime() {
  EmulatedRuntime* made = the_runtime.load(std::memory_order_acquire);
  if (made == nullptr) {
    // With another backend, Context::runtime() would create that backend's runtime.
    TORCH_CHECK(is_registered(), "the emulated accelerator is not in use in this process, whose backend is '",
                Context::get().backend_name(), "'; TORCH_UVM_DEVICE=emu registers it");
    Context::get().runtime();
    made = the_runtime.load(std::memory_order_acquire);
  }
  return *made;
}

CachingManagedAllocator& plain_allocator() {
  static CachingManagedAllocator& allocator = []() -> CachingManagedAllocator& {
    // Leaked, because tensors outlive static destructors.
    auto* made = new CachingManagedAllocator(runtime(), std::make_unique<DeviceSegmentSource>(runtime()));
    set_plain_allocator(made);
    pthread_atfork([] { plain_allocator().before_fork(); }, [] { plain_allocator().after_fork_in_parent(); },
                   [] { plain_allocator().after_fork_in_child(); });
    return *made;
  }();
  return allocator;
}

int device_count() {
  const EmulatedRuntime* made = the_runtime.load(std::memory_order_acquire);
  return made != nullptr ? made->device_count() : Context::get().options().emulated.devices;
}

int checked_index(c10::DeviceIndex index) {
  const int count = device_count();
  TORCH_CHECK_VALUE(index >= -1 && index < count, "emu device index ", int{index}, "; there are ", count, " (0 to ",
                    count - 1, ")");
  return index < 0 ? current_device() : index;
}

void check_not_forked() {
  TORCH_CHECK(!Context::get().forked(),
              "work of the emulated accelerator in a forked process: its devices belong to the parent; start workers "
              "with 'spawn' or 'forkserver'");
}

int current_device() {
  return thread_device;
}

void set_current_device(int device) {
  const int count = device_count();
  TORCH_CHECK_VALUE(device >= 0 && device < count, "emu device index ", device, "; there are ", count, " (0 to ",
                    count - 1, ")");
  thread_device = device;
}

int exchange_device(int device) {
  return std::exchange(thread_device, device);
}

Stream current_stream(int device) {
  return Stream{device, thread_streams[static_cast<std::size_t>(device)]};
}

Stream exchange_stream(Stream stream) {
  const Stream previous = current_stream(stream.device);
  thread_streams[static_cast<std::size_t>(stream.device)] = stream.handle;
  return previous;
}

c10::Stream to_torch(Stream stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(stream.device)),
                     reinterpret_cast<c10::StreamId>(stream.handle));
}

Stream from_torch(const c10::Stream& stream) {
  return Stream{stream.device_index(), reinterpret_cast<void*>(stream.id())};
}

} // namespace torch_uvm::emulated
