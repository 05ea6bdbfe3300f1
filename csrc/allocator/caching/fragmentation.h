// Why memory that is free does not serve a request: how large its pieces are, and what else is reserved in vain.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "runtime/bytes.h"

namespace torch_uvm {

/// All figures are bytes unless they say otherwise. A block counts for the home that it is filed under; a segment, and
/// so `reserved`, for the one that it was made for.
struct Fragmentation {
  /// Free pieces of at least so many bytes, and of fewer than the next entry has.
  static constexpr std::array<std::size_t, 7> kLeast = {0, 64 * KiB, 1 * MiB, 8 * MiB, 32 * MiB, 128 * MiB, 1024 * MiB};
  struct Pieces {
    std::size_t count = 0;
    std::size_t bytes = 0;
  };

  std::size_t reserved = 0;
  std::size_t allocated = 0;
  std::size_t requested = 0;
  std::size_t pending = 0; ///< freed, and waited for
  std::size_t free = 0;
  std::size_t inactive_split = 0; ///< free, in segments that are partly in use
  std::size_t unused_segments = 0; ///< free, in segments that are not: what empty_cache gives back
  std::size_t largest_free = 0; ///< the largest piece
  std::array<Pieces, kLeast.size()> pieces; ///< of `free`, by size

  /// Lost to rounding sizes up.
  std::size_t rounding() const {
    return allocated - requested;
  }
  /// The part of the free bytes that is not in the largest piece; 0 where nothing is free.
  double share_outside_largest() const {
    return free == 0 ? 0 : 1 - static_cast<double>(largest_free) / static_cast<double>(free);
  }
};

/// \param home nullopt: all homes together
Fragmentation fragmentation(const std::vector<SegmentInfo>& snapshot, std::optional<Location> home = std::nullopt);

/// A table for people, of several lines.
std::string fragmentation_table(const Fragmentation& fragmentation);

} // namespace torch_uvm
