// Formatting, parsing and rounding of byte counts.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace torch_uvm {

constexpr std::size_t KiB = 1024;
constexpr std::size_t MiB = 1024 * KiB;
constexpr std::size_t GiB = 1024 * MiB;

/// `value` rounded up to a multiple of `step` (a power of two).
constexpr std::size_t round_up(std::size_t value, std::size_t step) {
  return (value + step - 1) & ~(step - 1);
}

/// `value` rounded down to a multiple of `step` (a power of two).
constexpr std::size_t round_down(std::size_t value, std::size_t step) {
  return value & ~(step - 1);
}

/// "1.50 GiB", "512 B": two decimals from KiB on.
std::string format_bytes(std::size_t bytes);

/// Removes surrounding white space.
std::string_view trim(std::string_view text);

/// Exact, for parse_bytes to read again: a whole number of the largest unit that divides it, such as "1536MiB".
std::string exact_bytes(std::size_t bytes);

/// Parses "4GiB", "512 MiB", "64KiB", "1.5GiB" or "4096". Units: B, KiB, MiB, GiB, TiB (powers of 1024) and KB, MB, GB,
/// TB (powers of 1000). Case is ignored, and so are spaces around the number and the unit.
/// \throws InvalidArgument, naming the text and the accepted forms, for any other text, a negative number, a fraction
///         of a byte, or a number that does not fit a size_t
std::size_t parse_bytes(std::string_view text);

} // namespace torch_uvm
