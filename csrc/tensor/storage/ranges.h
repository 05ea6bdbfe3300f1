// Sets of bytes, as lists of address ranges.
#pragma once

#include <vector>

#include "runtime/host_memory.h"

namespace torch_uvm {

using Range = AddressRange;
using Ranges = std::vector<Range>; ///< unless noted: sorted, non-empty, neither overlapping nor adjacent

/// Sorts, drops empty ranges, and merges overlapping or adjacent ones.
void normalise(Ranges& ranges);
/// The intersection of a set with a range, found by binary search. Ranges of the set may be adjacent.
Ranges within(const Ranges& ranges, Range range);

} // namespace torch_uvm
