// Host memory: from mmap, for the runtimes without CUDA; what a forked child inherits of it; which of it is a file; how
// much the host has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>

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

// --- mapped_file.cpp

/// Whether the whole range lies in writable private mappings of files, whose pages are copied when they are written. It
/// is what torch.load(mmap=True) and safetensors make. False if it cannot be found out; does not fail.
bool is_private_file_mapping(const void* ptr, std::size_t bytes) noexcept;

/// The same for the contents of a file like /proc/self/maps, for tests.
bool is_private_file_mapping(std::istream& maps, AddressRange range);

// --- host_available.cpp: the host's available and total memory, read from /proc and /sys

/// Bytes that the operating system could give a new program: Linux's MemAvailable, or less if a control group limits
/// this process; SIZE_MAX if the system reports neither. Does not fail.
/// \param root of /proc and /sys: "" is the real system; tests create their own files
std::size_t operating_system_memory_available(const std::string& root = "");

/// Bytes of memory that this process could have if no other ran: Linux's MemTotal, or the limit of a control group.
/// Otherwise the same.
std::size_t operating_system_memory_total(const std::string& root = "");

/// What may be pinned of the host's available memory: all but a reserve for the rest of the machine, a sixteenth of its
/// memory and at least 2 GiB, but at most half of what is available.
/// \param available,total SIZE_MAX if the system does not report them. \return SIZE_MAX if `available` is
std::size_t spare_host_memory(std::size_t available, std::size_t total);

} // namespace torch_uvm
