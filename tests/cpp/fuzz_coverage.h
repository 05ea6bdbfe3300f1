// Which code a fuzzer's input reached, where GCC tells: -fsanitize-coverage=trace-pc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fuzz {

/// By hash of where, since somebody filled it with 0.
extern std::array<std::uint8_t, std::size_t{1} << 16> reached;

} // namespace fuzz
