#include "tensor/storage/ranges.h"

#include <algorithm>

namespace torch_uvm {

void normalise(Ranges& ranges) {
  std::erase_if(ranges, [](const Range& range) { return range.bytes() == 0; });
  if (!std::ranges::is_sorted(ranges, {}, &Range::begin)) {
    std::ranges::sort(ranges, {}, &Range::begin);
  }
  std::size_t kept = 0;
  for (std::size_t index = 1; index < ranges.size(); ++index) {
    if (ranges[index].begin <= ranges[kept].end) {
      ranges[kept].end = std::max(ranges[kept].end, ranges[index].end);
    } else {
      ranges[++kept] = ranges[index];
    }
  }
  if (!ranges.empty()) {
    ranges.resize(kept + 1);
  }
}

Ranges within(const Ranges& ranges, Range range) {
  Ranges inside;
  for (auto next = std::ranges::upper_bound(ranges, range.begin, {}, &Range::end);
       next != ranges.end() && next->begin < range.end; ++next) {
    inside.push_back({std::max(next->begin, range.begin), std::min(next->end, range.end)});
  }
  return inside;
}

} // namespace torch_uvm
