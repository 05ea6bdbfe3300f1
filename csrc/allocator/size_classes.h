// Sizes of blocks and segments.
//
// Requests fall into three size classes. Small requests have segments of their own; medium and large ones usually share
// segments (segment_sizes.cpp). Block sizes are multiples of a few granularities, so that a freed block fits later
// requests of similar size while rounding wastes little.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "allocator/statistics.h"
#include "runtime/bytes.h"

namespace torch_uvm {

enum class SizeClass : std::uint8_t { kSmall, kMedium, kLarge };
constexpr std::size_t kSizeClasses = 3;

/// Guaranteed alignment. Vectorised kernels rely on it, and cudaMalloc provides it.
constexpr std::size_t kBlockAlignment = 512;
/// Small blocks, mostly scalars, biases and indices, need only the alignment.
constexpr std::size_t kSmallGranularity = kBlockAlignment;
/// Medium blocks are multiples of the migration granularity, so that a hint about one does not affect its neighbour.
constexpr std::size_t kMediumGranularity = 64 * KiB;
/// Large pages of the device. Segments are multiples of them.
constexpr std::size_t kLargeGranularity = 2 * MiB;
/// Requests from this size on get blocks that start on a large page and fill whole pages; this wastes less than 1/16.
/// For smaller requests, rounding to whole pages would cost up to a third of what irregular sizes waste, and as much
/// again in holes that no request fits.
constexpr std::size_t kWholePagesRequest = 32 * MiB;

/// Requests up to this size are small. Thousands of them share a segment, which is one large page at first.
constexpr std::size_t kSmallRequest = 1 * MiB;
constexpr std::size_t kSmallSegment = 2 * MiB;
/// Requests from this size on are large: where segments are not shared, each gets a segment of its own size.
constexpr std::size_t kLargeRequest = 10 * MiB;
/// Segment for medium requests where they do not share with large ones. A prefetch of 20 MiB runs near the link's rate,
/// one of 2 MiB at a third of it.
constexpr std::size_t kMediumSegment = 20 * MiB;
/// Default minimum and maximum of a segment shared by medium and large requests. Its size grows with the reserved
/// bytes.
constexpr std::size_t kSegmentMin = 32 * MiB;
constexpr std::size_t kSegmentMax = 128 * MiB;

/// No machine has more memory; rounding up a larger size could overflow.
constexpr std::size_t kLargestRequest = std::numeric_limits<std::size_t>::max() / 4;

constexpr SizeClass size_class(std::size_t requested) {
  return requested <= kSmallRequest  ? SizeClass::kSmall
         : requested < kLargeRequest ? SizeClass::kMedium
                                     : SizeClass::kLarge;
}

/// Size of the block that serves a request.
/// \param whole_pages requests from this size on are rounded up to large pages. Under a cap this is kLargeRequest: with
///         few distinct sizes, blocks can replace each other and leave no gaps
constexpr std::size_t block_bytes(std::size_t requested, std::size_t whole_pages = kWholePagesRequest) {
  return round_up(requested, requested <= kSmallRequest ? kSmallGranularity
                             : requested < whole_pages  ? kMediumGranularity
                                                        : kLargeGranularity);
}

/// The pool under which the statistics count a size class.
constexpr PoolKind pool_kind(SizeClass kind) {
  return kind == SizeClass::kSmall ? PoolKind::kSmall : PoolKind::kLarge;
}

} // namespace torch_uvm
