// CPU tensors in managed memory: torch_uvm.enable(host_tensors=True).
//
// Replaces PyTorch's CPU allocator by one that delegates. While this switch is on, and managed memory is on for the
// calling thread, large CPU tensors get managed memory whose home is the host. All other requests go to the native
// allocator.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <optional>

namespace torch_uvm {

/// Smaller tensors stay in ordinary memory: moving one costs more than copying it.
constexpr std::size_t kHostTensorBytes = std::size_t{1} << 20;

/// Sets the process-wide switch. Existing tensors are not affected.
/// \throws c10::Error if there is no backend
void set_host_tensors(bool on);
bool host_tensors();

/// Allocates what a CPU kernel that runs for a device asks for; nullopt: the calling thread runs none.
using KernelMemory = std::optional<c10::DataPtr> (*)(std::size_t bytes);

/// Installs the allocator, once per process and permanently; `set_host_tensors(true)` also does.
/// \param kernels asked before all else, if the backend runs CPU kernels for its devices; its memory is found by
/// address
///        (data_by_address)
void install_host_tensors(KernelMemory kernels = nullptr);
/// Whether `kernels` allocated the memory.
bool is_kernel_memory(const c10::DataPtr& data);

} // namespace torch_uvm
