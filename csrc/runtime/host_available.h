// The host's available and total memory, read from /proc and /sys.
#pragma once

#include <cstddef>
#include <string>

namespace torch_uvm {

/// operating_system_memory_available for a system whose /proc and /sys are below `root`. "" is the real system; tests
/// create their own files.
std::size_t memory_available_below(const std::string& root);
/// The same for operating_system_memory_total.
std::size_t memory_total_below(const std::string& root);

/// What may be pinned of the host's available memory: all but a reserve for the rest of the machine, a sixteenth of its
/// memory and at least 2 GiB, but at most half of what is available.
/// \param available,total SIZE_MAX if the system does not report them. \return SIZE_MAX if `available` is
std::size_t spare_host_memory(std::size_t available, std::size_t total);

} // namespace torch_uvm
