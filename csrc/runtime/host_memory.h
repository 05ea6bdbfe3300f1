// Host memory from mmap, for the runtimes without CUDA, and control over what a forked child inherits of it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace torch_uvm {

/// Maps zeroed pages at a multiple of `alignment` (a power of two). Pages take no physical memory until written.
/// \throws OutOfMemory if the operating system refuses
void* map_host_memory(std::size_t bytes, std::size_t alignment);

/// Unmaps memory of map_host_memory(bytes). Any later access is a segmentation fault.
void unmap_host_memory(void* ptr, std::size_t bytes) noexcept;

/// The half-open range [begin, end).
struct AddressRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  std::size_t bytes() const {
    return end > begin ? end - begin : 0;
  }
  void* data() const {
    return reinterpret_cast<void*>(begin);
  }
  bool operator==(const AddressRange&) const = default;
};

/// The largest range of whole pages inside a range, and the smallest one around it.
AddressRange rounded_inwards(AddressRange range, std::size_t page) noexcept;
AddressRange rounded_outwards(AddressRange range, std::size_t page) noexcept;
/// The same for the operating system's pages.
AddressRange pages_within(AddressRange range) noexcept;
AddressRange pages_around(AddressRange range) noexcept;

// Whether children forked later inherit the whole pages within a range: not at all (MADV_DONTFORK), or copy-on-write as
// by default (MADV_DOFORK). Failure is ignored: the kernel refuses both for mappings that it treats specially, such as
// a driver's. The driver alone decides what a child inherits of those, and undoing the mark fails the same way.
void keep_from_children(void* ptr, std::size_t bytes) noexcept;
void leave_to_children(void* ptr, std::size_t bytes) noexcept;

/// Copies whole pages to new memory, which children inherit; nullptr if the operating system refuses.
void* copy_pages(AddressRange pages) noexcept;
/// In the child: moves a copy to the address of its original, where nothing may be mapped.
/// \return false: the move failed, and the copy stays where it was
bool move_pages(void* copy, AddressRange to) noexcept;

} // namespace torch_uvm
