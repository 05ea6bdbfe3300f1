// Byte counts as people write and read them.
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

/// As it may be parsed again, with nothing lost: a whole number of the largest unit that has one, "1536MiB".
std::string exact_bytes(std::size_t bytes);

/// The bytes in "4GiB", "512 MiB", "64KiB", "1.5GiB" or "4096" (units KiB, MiB, GiB, TiB, and KB, MB,
/// GB, TB in powers of ten, B; case does not matter; spaces around are ignored).
/// \throws InvalidArgument naming the text and the accepted forms; also for negative figures, fractions
/// of a byte, and what does not fit a size_t.
std::size_t parse_bytes(std::string_view text);

} // namespace torch_uvm
