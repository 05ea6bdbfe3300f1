#include "runtime/host_memory.h"

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <string_view>

namespace torch_uvm {

bool is_private_file_mapping(std::istream& maps, AddressRange range) {
  std::string line; // "7f00-7f40 rw-p 00001000 08:01 1234    /path"; sorted by address
  for (std::uintptr_t reached = range.begin; std::getline(maps, line);) {
    std::uintptr_t begin = 0, end = 0;
    std::uint64_t inode = 0;
    char rights[5]{};
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %" SCNu64, &begin, &end, rights, &inode) !=
        4) {
      return false;
    }
    if (end <= reached) {
      continue;
    }
    const std::string_view flags = rights;
    if (begin > reached || !flags.starts_with("rw") || !flags.ends_with('p') || inode == 0) {
      return false;
    }
    if (end >= range.end) {
      return true;
    }
    reached = end; // the kernel splits a mapping whose parts differ, as after mprotect
  }
  return false;
}

bool is_private_file_mapping(const void* ptr, std::size_t bytes) noexcept {
  try {
    std::ifstream maps("/proc/self/maps");
    const auto begin = reinterpret_cast<std::uintptr_t>(ptr);
    return bytes != 0 && is_private_file_mapping(maps, {begin, begin + bytes});
  } catch (const std::exception&) {
    return false;
  }
}

} // namespace torch_uvm
