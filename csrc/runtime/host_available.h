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

} // namespace torch_uvm
