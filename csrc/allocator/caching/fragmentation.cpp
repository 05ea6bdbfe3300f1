#include "allocator/caching/fragmentation.h"

#include <algorithm>
#include <cstdio>

namespace torch_uvm {

Fragmentation fragmentation(const std::vector<SegmentInfo>& snapshot, std::optional<Location> home) {
  Fragmentation found;
  for (const SegmentInfo& segment : snapshot) {
    if (!home || segment.home == *home) {
      found.reserved += segment.bytes;
    }
    for (const BlockInfo& block : segment.blocks) {
      if (home && block.home != *home) {
        continue;
      }
      switch (block.state) {
        case BlockInfo::State::kAllocated:
          found.allocated += block.bytes;
          found.requested += block.requested_bytes;
          break;
        case BlockInfo::State::kPendingFree:
          found.pending += block.bytes;
          break;
        case BlockInfo::State::kFree: {
          found.free += block.bytes;
          (segment.active_bytes == 0 ? found.unused_segments : found.inactive_split) += block.bytes;
          found.largest_free = std::max(found.largest_free, block.bytes);
          const auto above = std::ranges::upper_bound(Fragmentation::kMin, block.bytes);
          auto& pieces = found.pieces[static_cast<std::size_t>(above - Fragmentation::kMin.begin()) - 1];
          ++pieces.count;
          pieces.bytes += block.bytes;
          break;
        }
      }
    }
  }
  return found;
}

std::string fragmentation_table(const Fragmentation& found) {
  std::string table;
  std::array<char, 160> line{};
  const auto add = [&](int length) { table.append(line.data(), static_cast<std::size_t>(length)); };
  const auto row = [&](const char* name, std::size_t bytes, const char* what) {
    add(std::snprintf(line.data(), line.size(), "%-18s%14s  %s\n", name, format_bytes(bytes).c_str(), what));
  };
  row("reserved", found.reserved, "segments made for it");
  row("requested", found.requested, "by live allocations");
  row("rounding", found.rounding(), "added to the requests by rounding up");
  row("pending", found.pending, "freed, but still in use by a stream");
  row("inactive split", found.inactive_split, "free, in segments partly in use");
  row("unused segments", found.unused_segments, "free, in segments that empty_cache releases");
  row("largest piece", found.largest_free, "free");
  for (std::size_t i = 0; i < found.pieces.size(); ++i) {
    const Fragmentation::Pieces& pieces = found.pieces[i];
    if (pieces.count == 0) {
      continue;
    }
    const bool last = i + 1 == found.pieces.size();
    const std::string range =
        last ? format_bytes(Fragmentation::kMin[i]) + " and more" : "below " + format_bytes(Fragmentation::kMin[i + 1]);
    add(std::snprintf(line.data(), line.size(), "  %-16s%14s  in %zu free %s\n", range.c_str(),
                      format_bytes(pieces.bytes).c_str(), pieces.count, pieces.count == 1 ? "piece" : "pieces"));
  }
  return table;
}

} // namespace torch_uvm
