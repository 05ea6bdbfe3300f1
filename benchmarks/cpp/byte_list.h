// Lists of sizes on a command line, such as "512MiB,1GiB".
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "runtime/bytes.h"

namespace torch_uvm {

/// \throws InvalidArgument
inline std::vector<std::size_t> parse_list(std::string_view text) {
  std::vector<std::size_t> list;
  while (true) {
    const std::size_t comma = text.find(',');
    list.push_back(parse_bytes(text.substr(0, comma)));
    if (comma == text.npos) {
      return list;
    }
    text.remove_prefix(comma + 1);
  }
}

} // namespace torch_uvm
