// Memory of the emulated accelerator, as PyTorch asks for it.
#pragma once

#include <c10/core/Allocator.h>

namespace torch_uvm::emulated {

/// Memory of `device` for the calling thread's current stream there: managed while the switch is on,
/// else plain.
c10::DataPtr allocate(int device, std::size_t bytes);

/// The allocator that PyTorch's allocator table has for PrivateUse1; a c10::DeviceAllocator. Leaked.
c10::Allocator* device_allocator();

/// Pinned host memory. Leaked.
c10::Allocator* pinned_allocator();

/// Puts a delegating allocator in the CPU's place, once and for good: what CPU kernels allocate while
/// an AllocationScope is open is memory of that device; all else goes to the allocator that was there.
void install_cpu_allocator();

/// While it lives, CPU allocations of this thread are memory of `device`.
class AllocationScope {
 public:
  explicit AllocationScope(int device);
  ~AllocationScope();
  AllocationScope(const AllocationScope&) = delete;
  AllocationScope& operator=(const AllocationScope&) = delete;

 private:
  int previous_;
};

/// Whether `data` is memory that the CPU's allocator made in an AllocationScope.
bool is_kernel_memory(const c10::DataPtr& data);

/// The same memory as `device`'s own; `data` is kernel memory, and loses it.
c10::DataPtr adopt_kernel_memory(c10::DataPtr& data, int device);

/// The reverse, inside a kernel: ordinary CPU memory for what must outlive it on the CPU.
class OrdinaryAllocationScope {
 public:
  OrdinaryAllocationScope();
  ~OrdinaryAllocationScope();
  OrdinaryAllocationScope(const OrdinaryAllocationScope&) = delete;
  OrdinaryAllocationScope& operator=(const OrdinaryAllocationScope&) = delete;

 private:
  int previous_;
};

} // namespace torch_uvm::emulated
