// Allocators of the emulated accelerator.
#pragma once

#include <c10/core/Allocator.h>

namespace torch_uvm::emulated {

/// Allocates on `device`, for the calling thread's current stream there: managed memory while the switch is on, plain
/// memory otherwise.
c10::DataPtr allocate(int device, std::size_t bytes);

/// PyTorch's allocator for PrivateUse1, a c10::DeviceAllocator. Leaked.
c10::Allocator* device_allocator();

/// PyTorch's allocator of pinned host memory. Leaked.
c10::Allocator* pinned_allocator();

/// Replaces PyTorch's CPU allocator by one that allocates on a device inside an AllocationScope and delegates to the
/// previous allocator otherwise. Called once, never undone.
void install_cpu_allocator();

/// No device: ordinary memory.
constexpr int kOrdinary = -1;

/// Within the scope, CPU allocations of this thread are memory of `device`: "kernel memory". With kOrdinary they are
/// ordinary again, for results that stay on the CPU.
class AllocationScope {
 public:
  explicit AllocationScope(int device);
  ~AllocationScope();
  AllocationScope(const AllocationScope&) = delete;
  AllocationScope& operator=(const AllocationScope&) = delete;

 private:
  int previous_;
};

/// Takes kernel memory out of `data` and returns it as memory of `device`.
c10::DataPtr adopt_kernel_memory(c10::DataPtr& data, int device);

} // namespace torch_uvm::emulated
