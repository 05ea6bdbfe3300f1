// The host's available and total memory, read from /proc and /sys.
#pragma once

#include <cstddef>
#include <string>

namespace torch_uvm {

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
