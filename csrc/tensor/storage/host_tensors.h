// CPU tensors in managed memory: torch_uvm.enable(host_tensors=True).
//
// A delegating allocator in the CPU's place. While the switch is on, and managed memory is on for the
// calling thread, large CPU tensors are managed memory at home host; all else is the native allocator's.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>

namespace torch_uvm {

/// Smaller tensors stay ordinary: moving one costs more than copying it.
constexpr std::size_t kHostTensorBytes = std::size_t{1} << 20;

/// The process-wide switch. Tensors made before stay what they are.
/// \throws c10::Error where there is no backend to have managed memory from
void set_host_tensors(bool on);
bool host_tensors();

/// Puts the allocator in place, once and for good; `set_host_tensors` does so, too. A backend that
/// looks at CPU allocations itself calls this first, and puts its own allocator over it.
void install_host_tensors();

} // namespace torch_uvm
