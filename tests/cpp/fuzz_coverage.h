// The edges that a fuzzer's input reached, as reported by GCC's -fsanitize-coverage=trace-pc.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace fuzz {

/// By hash of the edge's address; 1 if it was reached since the last reset.
extern std::array<std::uint8_t, std::size_t{1} << 16> reached;

} // namespace fuzz
