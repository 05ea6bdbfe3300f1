// Fragmentation report: sizes of the free pieces, and what else is reserved but unused.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "runtime/bytes.h"

namespace torch_uvm {

/// All figures are bytes unless stated otherwise. A block counts for the home it is filed under. A segment, and so
/// `reserved`, counts for the home it was made for.
struct Fragmentation {
  /// Histogram bounds: a bucket has free pieces of at least this size, and smaller than the next entry.
  static constexpr std::array<std::size_t, 7> kMin = {0, 64 * KiB, 1 * MiB, 8 * MiB, 32 * MiB, 128 * MiB, 1024 * MiB};
  struct Pieces {
    std::size_t count = 0;
    std::size_t bytes = 0;
  };

  std::size_t reserved = 0;
  std::size_t allocated = 0;
  std::size_t requested = 0;
  std::size_t pending = 0; ///< freed, but waiting for device work
  std::size_t free = 0;
  std::size_t inactive_split = 0; ///< free bytes in segments partly in use
  std::size_t unused_segments = 0; ///< free bytes in unused segments, which empty_cache releases
  std::size_t largest_free = 0; ///< the largest piece
  std::array<Pieces, kMin.size()> pieces; ///< histogram of the free pieces by size

  /// Bytes lost to rounding sizes up.
  std::size_t rounding() const {
    return allocated - requested;
  }
  /// Fraction of the free bytes outside the largest piece; 0 if nothing is free.
  double share_outside_largest() const {
    return free == 0 ? 0 : 1 - static_cast<double>(largest_free) / static_cast<double>(free);
  }
};

/// \param home nullopt: all homes together
Fragmentation fragmentation(const std::vector<SegmentInfo>& snapshot, std::optional<Location> home = std::nullopt);

/// A human-readable table of several lines.
std::string fragmentation_table(const Fragmentation& fragmentation);

} // namespace torch_uvm
