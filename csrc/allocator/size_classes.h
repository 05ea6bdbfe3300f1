// How large blocks and segments are.
//
// Requests fall into three classes. Small ones have segments of their own; medium and large ones share theirs as a
// rule (segment_sizes.cpp). Every block is a multiple of few granularities, so that what one ragged request leaves
// behind fits the next one, and the waste of rounding stays small.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "allocator/statistics.h"
#include "runtime/bytes.h"

namespace torch_uvm {

enum class SizeClass : std::uint8_t { kSmall, kMedium, kLarge };
constexpr std::size_t kSizeClasses = 3;

/// What callers may rely on: vectorised kernels want it, and cudaMalloc gives it.
constexpr std::size_t kBlockAlignment = 512;
/// Small blocks: the alignment itself; most are scalars, biases and indices.
constexpr std::size_t kSmallGranularity = kBlockAlignment;
/// Medium blocks: pages that migrate as one, so that a hint about a block is not one about its neighbour.
constexpr std::size_t kMediumGranularity = 64 * KiB;
/// The device's large pages, of which segments are made.
constexpr std::size_t kLargeGranularity = 2 * MiB;
/// Blocks for requests from this on start on a large page and fill their pages, at a waste below a sixteenth. For those
/// below, rounding would cost up to a third of what ragged sizes waste, and as much again in holes that fit nobody.
constexpr std::size_t kWholePagesRequest = 32 * MiB;

/// A request up to this is small: some thousand of them share the large page that is their segment.
constexpr std::size_t kSmallRequest = 1 * MiB;
constexpr std::size_t kSmallSegment = 2 * MiB;
/// A request from this on is large: where segments are not shared, it gets one of its own size.
constexpr std::size_t kLargeRequest = 10 * MiB;
/// Where they are not, medium requests share these: a prefetch of 20 MiB runs near the link's rate, one of 2 MiB at a
/// third of it.
constexpr std::size_t kMediumSegment = 20 * MiB;
/// What medium and large requests share at first, and at most: they grow with what there is.
constexpr std::size_t kSegmentMin = 32 * MiB;
constexpr std::size_t kSegmentMax = 128 * MiB;

/// No machine has more; rounding a larger figure up could overflow.
constexpr std::size_t kLargestRequest = std::numeric_limits<std::size_t>::max() / 4;

/// Under max_split_bytes a block that must stay whole may exceed the request by less than this.
constexpr std::size_t kWholeBlockSlack = kMediumSegment;

constexpr SizeClass size_class(std::size_t requested) {
  return requested <= kSmallRequest  ? SizeClass::kSmall
         : requested < kLargeRequest ? SizeClass::kMedium
                                     : SizeClass::kLarge;
}

/// The bytes of the block that serves a request.
/// \param whole_pages requests from this on are rounded up to large pages. Under a cap those from kLargeRequest on are:
///        blocks of few sizes take each other's place there, and nothing is left between them
constexpr std::size_t block_bytes(std::size_t requested, std::size_t whole_pages = kWholePagesRequest) {
  return round_up(requested, requested <= kSmallRequest ? kSmallGranularity
                             : requested < whole_pages  ? kMediumGranularity
                                                        : kLargeGranularity);
}

/// What such a block's address is a multiple of, in memory whose pages move.
constexpr std::size_t block_alignment(std::size_t requested) {
  return requested < kWholePagesRequest ? kBlockAlignment : kLargeGranularity;
}

constexpr std::size_t kMostDivisions = 64;
/// Rounds up to a multiple of an n-th of the power of two below, as roundup_power2_divisions of PyTorch does.
/// \param divisions a power of two; 0: no rounding
constexpr std::size_t round_up_to_division(std::size_t bytes, std::size_t divisions) {
  if (divisions == 0 || bytes <= divisions) {
    return bytes;
  }
  return round_up(bytes, std::bit_floor(bytes) / divisions);
}

/// The bytes of the segment to make for it, where it shares none with large ones.
constexpr std::size_t segment_bytes(std::size_t requested) {
  const SizeClass kind = size_class(requested);
  return kind == SizeClass::kSmall    ? kSmallSegment
         : kind == SizeClass::kMedium ? kMediumSegment
                                      : round_up(requested, kLargeGranularity);
}

/// The pool that the statistics count a class in.
constexpr PoolKind pool_kind(SizeClass kind) {
  return kind == SizeClass::kSmall ? PoolKind::kSmall : PoolKind::kLarge;
}

} // namespace torch_uvm
