#include "tensor/storage/host_tensors.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>

#include "tensor/process/context.h"
#include "tensor/process/switch.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

std::atomic<bool> host_tensors_on{false};
std::atomic<bool> any_made{false}; // while false, no raw pointer can be ours
std::atomic<KernelMemory> kernel_memory{nullptr};

c10::Device cpu() {
  return c10::Device(c10::DeviceType::CPU);
}

c10::DeleterFnPtr native_deleter = nullptr;

// Deleter of kernel memory, and of what raw_allocate returned: that may be ours or native, which only the address
// tells.
void delete_raw(void* ptr) {
  const c10::DataPtr ours = any_made.load(std::memory_order_relaxed) ? data_by_address(ptr, cpu()) : c10::DataPtr();
  if (ptr != nullptr && ours.get() == nullptr) { // else the destructor of `ours` frees the memory
    native_deleter(ptr);
  }
}

// c10::Allocator::raw_allocate, which oneDNN uses for scratch memory, demands that the context is the address. So the
// real context and deleter are looked up by the address.
c10::DataPtr found_by_address(c10::DataPtr data, c10::DeleterFnPtr deleter) {
  void* const ptr = data.get();
  data.release_context();
  any_made.store(true, std::memory_order_relaxed);
  return {ptr, ptr, deleter, cpu()};
}

struct HostTensorAllocator final : c10::Allocator {
  explicit HostTensorAllocator(c10::Allocator* native) : native(native) {}

  c10::DataPtr allocate(std::size_t bytes) override {
    if (const KernelMemory of_kernel = kernel_memory.load(std::memory_order_relaxed)) {
      if (std::optional<c10::DataPtr> data = of_kernel(bytes)) {
        return found_by_address(*std::move(data), &delete_raw);
      }
    }
    if (!host_tensors_on.load(std::memory_order_relaxed) || bytes < kHostTensorBytes || !managed_enabled() ||
        Context::get().forked()) {
      return native->allocate(bytes);
    }
    c10::DataPtr managed;
    try {
      // A CPU tensor is recognised by its address, so its block must be its own: a chosen allocator (`use_allocator`)
      // would make it a part of a larger one.
      std::optional<ManagedScope> process_allocator;
      if (current_allocator() != nullptr) {
        process_allocator.emplace(true, AllocatorChoice(std::shared_ptr<torch_uvm::Allocator>()));
      }
      managed = allocate_managed(bytes, Location::host(), Stream::host(), cpu());
    } catch (const c10::OutOfMemoryError& error) {
      // Fall back to ordinary memory: without host_tensors the script would have got its CPU tensor.
      TORCH_WARN_ONCE(
          "torch_uvm: a CPU tensor gets ordinary memory, as there is no managed memory for it (said once); raise the "
          "limit, or leave host_tensors off: ",
          error.what_without_backtrace());
      return native->allocate(bytes);
    }
    if (block_of(managed) == nullptr) {
      return managed; // ordinary memory: the process forked after the check above
    }
    return found_by_address(std::move(managed), host_tensor_deleter());
  }
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    // A managed DataPtr looks simple (its context is its address) but must not count as such: copy-on-write would
    // replace the deleter, and with it what marks the memory as managed.
    return !is_host_tensor(data) && native->is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_raw;
  }
  void copy_data(void* dst, const void* src, std::size_t bytes) const override {
    native->copy_data(dst, src, bytes);
  }

  c10::Allocator* const native;
};

} // namespace

void install_host_tensors(KernelMemory kernels) {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::Allocator* native = c10::GetCPUAllocator();
    native_deleter = native->raw_deleter();
    c10::SetCPUAllocator(new HostTensorAllocator(native), /*priority=*/1); // leaked, never uninstalled
  });
  if (kernels != nullptr) {
    kernel_memory.store(kernels);
  }
}

bool is_kernel_memory(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_raw;
}

void set_host_tensors(bool on) {
  if (on) {
    TORCH_CHECK(Context::get().backend_name() != "none",
                "host tensors are managed memory, and there is no device here to manage memory for");
    install_host_tensors();
  }
  host_tensors_on.store(on, std::memory_order_relaxed);
}

bool host_tensors() {
  return host_tensors_on.load(std::memory_order_relaxed);
}

} // namespace torch_uvm
