// What the host could still give, read from the operating system's files.
#pragma once

#include <cstddef>
#include <string>

namespace torch_uvm {

/// As operating_system_memory_available, of the system whose /proc and /sys are below `root` ("" for the
/// real ones; tests make their own).
std::size_t memory_available_below(const std::string& root);

} // namespace torch_uvm
