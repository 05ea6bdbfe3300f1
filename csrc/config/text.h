// Texts of options.
#pragma once

#include <cstddef>
#include <string_view>

namespace torch_uvm {

/// Removes surrounding white space.
inline std::string_view trim(std::string_view text) {
  constexpr std::string_view kSpaces = " \t\r\n";
  const std::size_t first = text.find_first_not_of(kSpaces);
  return first == text.npos ? std::string_view() : text.substr(first, text.find_last_not_of(kSpaces) - first + 1);
}

} // namespace torch_uvm
