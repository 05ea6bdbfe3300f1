// How large blocks and segments are.
//
// Requests fall into three classes that never share a segment (but for the last resort of the failure
// path). Within a class every block is a multiple of one granularity, so that what one ragged request
// leaves behind fits the next one, and the waste of rounding stays small.
#pragma once

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
/// Large blocks: the device's large pages. They start on one and fill it, at a waste below a sixth.
constexpr std::size_t kLargeGranularity = 2 * MiB;

/// A request up to this is small: some thousand of them share the large page that is their segment.
constexpr std::size_t kSmallRequest = 1 * MiB;
constexpr std::size_t kSmallSegment = 2 * MiB;
/// A request from this on is large and, where no cached block holds it, gets a segment of its own size.
constexpr std::size_t kLargeRequest = 10 * MiB;
/// Medium requests share these: a prefetch of 20 MiB runs near the link's rate, one of 2 MiB at a third of it.
constexpr std::size_t kMediumSegment = 20 * MiB;

/// No machine has more; rounding a larger figure up could overflow.
constexpr std::size_t kLargestRequest = std::numeric_limits<std::size_t>::max() / 4;

/// Under max_split_bytes a block that must stay whole may exceed the request by less than this.
constexpr std::size_t kWholeBlockSlack = kMediumSegment;

constexpr SizeClass size_class(std::size_t requested) {
  return requested <= kSmallRequest  ? SizeClass::kSmall
         : requested < kLargeRequest ? SizeClass::kMedium
                                     : SizeClass::kLarge;
}

constexpr std::size_t granularity(SizeClass kind) {
  return kind == SizeClass::kSmall    ? kSmallGranularity
         : kind == SizeClass::kMedium ? kMediumGranularity
                                      : kLargeGranularity;
}

/// The bytes of the block that serves a request.
constexpr std::size_t block_bytes(std::size_t requested) {
  return round_up(requested, granularity(size_class(requested)));
}

/// The bytes of the segment to make for it.
constexpr std::size_t segment_bytes(std::size_t requested) {
  const SizeClass kind = size_class(requested);
  return kind == SizeClass::kSmall    ? kSmallSegment
         : kind == SizeClass::kMedium ? kMediumSegment
                                      : block_bytes(requested);
}

/// The pool that the statistics count a class in.
constexpr PoolKind pool_kind(SizeClass kind) {
  return kind == SizeClass::kSmall ? PoolKind::kSmall : PoolKind::kLarge;
}

} // namespace torch_uvm
