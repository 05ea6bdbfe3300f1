// Which memory of the process is a file's mapping, read from /proc/self/maps.
#pragma once

#include <cstddef>
#include <istream>

#include "runtime/host_memory.h"

namespace torch_uvm {

/// Whether the whole range lies in writable private mappings of files, whose pages are copied when they are written. It
/// is what torch.load(mmap=True) and safetensors make. False if it cannot be found out; does not fail.
bool is_private_file_mapping(const void* ptr, std::size_t bytes) noexcept;

/// The same for the contents of a file like /proc/self/maps, for tests.
bool is_private_file_mapping(std::istream& maps, AddressRange range);

} // namespace torch_uvm
