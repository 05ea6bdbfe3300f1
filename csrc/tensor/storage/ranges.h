// Sets of bytes, as lists of address ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_uvm {

/// The half-open range [begin, end).
struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  std::size_t bytes() const {
    return end > begin ? end - begin : 0;
  }
  void* data() const {
    return reinterpret_cast<void*>(begin);
  }
  bool operator==(const Range&) const = default;
};

using Ranges = std::vector<Range>; ///< unless noted: sorted, non-empty, neither overlapping nor adjacent

/// Sorts, drops empty ranges, and merges overlapping or adjacent ones.
void normalise(Ranges& ranges);
/// The intersection of a set with a range, found by binary search. Ranges of the set may be adjacent.
Ranges within(const Ranges& ranges, Range range);
/// Adds a set to `into`.
void unite(Ranges& into, const Ranges& added);

/// The largest range of whole pages inside a range, and the smallest one around it.
Range rounded_inwards(Range range, std::size_t page);
Range rounded_outwards(Range range, std::size_t page);

} // namespace torch_uvm
