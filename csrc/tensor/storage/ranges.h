// Sets of bytes, as ranges of addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace torch_uvm {

/// Bytes from `begin` to before `end`.
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

using Ranges = std::vector<Range>; ///< sorted, none empty, none touching another, where nothing else is said

/// Sorts, and joins what touches or overlaps.
void normalise(Ranges& ranges);
/// What is left of `from` without `without`.
Ranges difference(const Ranges& from, const Ranges& without);
/// What of a set lies within a range; a binary search. Members may touch.
Ranges within(const Ranges& ranges, Range range);
/// Adds a set to another.
void unite(Ranges& into, const Ranges& added);

/// The largest whole pages within a range, and the smallest around it.
Range rounded_inwards(Range range, std::size_t page);
Range rounded_outwards(Range range, std::size_t page);

} // namespace torch_uvm
