// Host memory straight from the operating system, for the runtimes that have no other, and what a forked
// child gets of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_uvm {

/// Zeroed pages of host memory at an address that is a multiple of `alignment` (a power of two). They cost
/// nothing until they are written.
/// \throws OutOfMemory when the operating system refuses
void* map_host_memory(std::size_t bytes, std::size_t alignment);

/// Gives back what map_host_memory returned for `bytes`; touching it afterwards is a segmentation fault.
void unmap_host_memory(void* ptr, std::size_t bytes) noexcept;

/// From one address to another.
struct AddressRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  std::size_t bytes() const {
    return end > begin ? end - begin : 0;
  }
};

/// The whole pages of the operating system that lie within a range, and those that it touches.
AddressRange pages_within(AddressRange range) noexcept;
AddressRange pages_around(AddressRange range) noexcept;

// What a child forked from now on gets of a range's inner whole pages: nothing, or, as ever, a copy on
// write. Failure is not reported. The kernel refuses both for memory that is no mapping of its own
// (allocated by other means, or special to a driver); such memory a child has or lacks whatever we say, and
// undoing what was never done fails in the same way.
void keep_from_children(void* ptr, std::size_t bytes) noexcept;
void leave_to_children(void* ptr, std::size_t bytes) noexcept;

/// An ordinary copy of whole pages, which children do get; nullptr when the operating system refuses.
void* copy_pages(AddressRange pages) noexcept;
/// In the child: puts a copy at the address of its original, where nothing must be. \return false: it
/// could not be, and the copy is where it was
bool move_pages(void* copy, AddressRange to) noexcept;

} // namespace torch_uvm
