// Size of a new segment.
//
// Irregular request sizes leave holes that no other request fits. The larger a segment, the more of these holes are
// adjacent and merge. Medium and large requests therefore share segments, whose size grows with the bytes reserved.
#include <algorithm>

#include "allocator/caching/state.h"

namespace torch_uvm {
namespace {

/// From this cap on, other segments leave 1/kSmallShare of it to segments of small requests. Small blocks never move:
/// in a large segment they split what could be one range, and prevent its release when the cap is lowered.
constexpr std::size_t kMinForSmall = 16 * MiB;
constexpr std::size_t kSmallShare = 64;
/// The most that they leave. The adapters of a LoRA of 14 B, with an optimizer's state, take 216 MiB of small blocks.
constexpr std::size_t kSmallShareMax = 256 * MiB;
/// Maximum segment under a large budget, because making one takes time.
constexpr std::size_t kMaxUnderCap = 32 * 1024 * MiB;
/// A new segment is 1/kGrowth of the reserved bytes: it over-allocates little, and few calls of the source reach a
/// given size.
constexpr std::size_t kGrowth = 8;
constexpr std::size_t kSmallSegmentMax = 32 * MiB;
/// The same under a cap that is all that the device has, where each segment is an obstacle to large requests.
constexpr std::size_t kGrowthToCeiling = 2;
/// The same for pinned memory, which is slow to make and to free. Tensors that grow a little in each step, such as the
/// keys and values of a decoder, soon fit in no segment of the size that they had.
constexpr std::size_t kPinnedGrowth = 4;
constexpr std::size_t kPinnedSegmentMax = 1024 * MiB;

} // namespace

std::size_t CachingManagedAllocator::State::new_segment_bytes(const Request& request) const {
  const Location home = request.home;
  if (request.kind == SizeClass::kSmall) {
    const std::size_t grown = pool_statistics.reserved_bytes(home, PoolKind::kSmall) / kGrowth;
    const std::size_t bytes = std::clamp(round_down(grown, kLargeGranularity), kSmallSegment, kSmallSegmentMax);
    return bytes == kSmallSegment || cap_of(home) || !has_free(home, bytes) ? kSmallSegment : bytes;
  }
  const std::size_t own = round_up(request.bytes, kLargeGranularity);
  if (cap_of(home)) {
    return capped_segment_bytes(request, own);
  }
  const std::size_t unshared = request.kind == SizeClass::kMedium ? std::max(own, kMediumSegment) : own;
  if (!managed && home.is_host()) {
    const std::size_t grown = std::min(pool_statistics.reserved_bytes(home) / kPinnedGrowth, kPinnedSegmentMax);
    return std::max({grown / own * own, own, least_shared_segment});
  }
  if (!managed || !options.segment_min_bytes) { // the free memory of a device is not ours alone to claim
    return shares(home) ? std::max(own, least_shared_segment) : unshared;
  }
  const std::size_t least = round_up(*options.segment_min_bytes, kLargeGranularity);
  const std::size_t most = std::max(least, round_down(options.segment_max_bytes, kLargeGranularity));
  std::size_t bytes =
      std::clamp(round_up(pool_statistics.reserved_bytes(home) / kGrowth, kLargeGranularity), least, most);
  // Round down to a multiple of the request, so that a series of requests of this size fills the segment completely.
  bytes = std::max({bytes / own * own, own, least_shared_segment});
  return bytes == own || has_free(home, bytes) ? bytes : std::max(unshared, least_shared_segment);
}

std::size_t CachingManagedAllocator::State::capped_segment_bytes(const Request& request, std::size_t own) const {
  // Free bytes in two segments cannot serve one request, so one takes all of the cap. If that is all that the device
  // has, most programs need less of it: then segments grow.
  const DeviceCap& budget = caps[static_cast<std::size_t>(request.home.index)];
  const std::size_t cap = budget.cap.value_or(0);
  const std::size_t grown = pool_statistics.reserved_bytes(request.home) / kGrowthToCeiling;
  const std::size_t share =
      budget.ceiling <= cap ? std::clamp(grown, kMediumSegment, kMaxUnderCap) : std::min(cap, kMaxUnderCap);
  const std::size_t taken = this->taken(request.home.index) + left_for_small(request.home, request.kind, own);
  const std::size_t left = taken < cap ? cap - taken : 0;
  return std::max({own, round_down(std::min(left, share), kLargeGranularity), least_shared_segment});
}

std::size_t CachingManagedAllocator::State::left_for_small(Location home, SizeClass kind, std::size_t own) const {
  if (home.is_host() || kind == SizeClass::kSmall || caps[static_cast<std::size_t>(home.index)].leaves_none) {
    return 0;
  }
  const DeviceCap& budget = caps[static_cast<std::size_t>(home.index)];
  const std::size_t cap = budget.cap.value_or(0);
  const std::size_t share = std::clamp(round_down(cap / kSmallShare, kSmallSegment), kSmallSegment, kSmallShareMax);
  if (cap < kMinForSmall || own > cap - share) {
    return 0;
  }
  return share - std::min(share, pool_statistics.reserved_bytes(home, PoolKind::kSmall));
}

bool CachingManagedAllocator::State::has_free(Location home, std::size_t bytes) const {
  if (home.is_host() || !options.populate || !managed) {
    return true;
  }
  try {
    return runtime.memory_info(home.index).free >= bytes;
  } catch (const RuntimeFailure&) {
    return false; // unknown
  }
}

Block* CachingManagedAllocator::State::from_fresh_segment(const Request& request, Lock& lock,
                                                          std::optional<OutOfMemory>& refusal) {
  const std::size_t own = round_up(request.bytes, kLargeGranularity);
  if (excess(request.home, request.kind, own) > 0) { // what is left for small requests is taken last
    return nullptr;
  }
  for (std::size_t bytes = new_segment_bytes(request);; bytes = std::max(own, round_up(bytes / 2, kLargeGranularity))) {
    if (Block* const block = from_new_segment(request, bytes, lock, refusal)) {
      return block;
    }
    if (!refusal || bytes <= own) {
      return nullptr;
    }
  }
}

} // namespace torch_uvm
