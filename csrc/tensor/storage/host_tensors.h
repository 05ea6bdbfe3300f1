// CPU tensors in managed memory: torch_uvm.enable(host_tensors=True).
//
// Replaces PyTorch's CPU allocator by one that delegates. While this switch is on, and managed memory is on for the
// calling thread, large CPU tensors get managed memory whose home is the host. All other requests go to the native
// allocator.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace torch_uvm {

/// Smaller tensors stay in ordinary memory: moving one costs more than copying it.
constexpr std::size_t kHostTensorBytes = std::size_t{1} << 20;

/// Sets the process-wide switch. Existing tensors are not affected.
/// \throws c10::Error if there is no backend
void set_host_tensors(bool on);
bool host_tensors();

/// Installs the allocator, once per process and permanently; `set_host_tensors(true)` also does. A backend that
/// intercepts CPU allocations itself calls this first and installs its own allocator over it.
void install_host_tensors();

} // namespace torch_uvm
