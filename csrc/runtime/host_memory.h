// Host memory straight from the operating system, for the runtimes that have no other.
#pragma once

#include <cstddef>

namespace torch_uvm {

/// Zeroed pages of host memory at an address that is a multiple of `alignment` (a power of two). They cost
/// nothing until they are written.
/// \throws OutOfMemory when the operating system refuses
void* map_host_memory(std::size_t bytes, std::size_t alignment);

/// Gives back what map_host_memory returned for `bytes`; touching it afterwards is a segmentation fault.
void unmap_host_memory(void* ptr, std::size_t bytes) noexcept;

} // namespace torch_uvm
