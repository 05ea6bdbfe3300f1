// How much is asked of the source at once.
//
// Ragged sizes leave holes that fit nobody. The more of them lie in one piece of memory, the more of these holes meet:
// so medium and large requests share segments that grow with what there is, and few of them border on nothing.
#include <algorithm>

#include "allocator/caching/state.h"

namespace torch_uvm {
namespace {

/// From this cap on, the large segment leaves room for one of small requests. Small blocks never move: in the large
/// segment they would keep it from being given back when the cap is lowered.
constexpr std::size_t kLeastForSmall = 16 * MiB;
/// Of a segment under a large budget: making one takes time.
constexpr std::size_t kMaxUnderCap = 32 * 1024 * MiB;
/// A new segment is that part of what there is: never much too much, and few calls of the source until all is there.
constexpr std::size_t kGrowth = 8;
constexpr std::size_t kSmallSegmentMax = 32 * MiB;

} // namespace

std::size_t CachingManagedAllocator::State::new_segment_bytes(const Request& request) const {
  const Location home = request.home;
  if (request.kind == SizeClass::kSmall) {
    const std::size_t grown = ledger.reserved_bytes(home, PoolKind::kSmall) / kGrowth;
    const std::size_t bytes = std::clamp(round_down(grown, kLargeGranularity), kSmallSegment, kSmallSegmentMax);
    return bytes == kSmallSegment || cap_of(home) || !has_free(home, bytes) ? kSmallSegment : bytes;
  }
  const std::size_t own = round_up(request.bytes, kLargeGranularity);
  if (cap_of(home)) {
    return capped_segment_bytes(request, own);
  }
  const std::size_t unshared = request.kind == SizeClass::kMedium ? std::max(own, kMediumSegment) : own;
  if (!managed || !options.segment_min_bytes) { // a device's own memory has others who count what is free of it
    return shares(home) ? std::max(own, least_shared_segment) : unshared;
  }
  const std::size_t least = round_up(*options.segment_min_bytes, kLargeGranularity);
  const std::size_t most = std::max(least, round_down(options.segment_max_bytes, kLargeGranularity));
  std::size_t bytes = std::clamp(round_up(ledger.reserved_bytes(home) / kGrowth, kLargeGranularity), least, most);
  if (options.max_split_bytes) { // more would stay whole
    bytes = std::min(bytes, round_down(*options.max_split_bytes, kLargeGranularity));
  }
  // A multiple of the request: others of its size leave nothing over, which would be missed where memory is short.
  bytes = std::max({bytes / own * own, own, least_shared_segment});
  return bytes == own || has_free(home, bytes) ? bytes : std::max(unshared, least_shared_segment);
}

std::size_t CachingManagedAllocator::State::capped_segment_bytes(const Request& request, std::size_t own) const {
  // One segment of a hard cap: free bytes in two segments cannot serve one request. A soft cap is rarely reached.
  const std::size_t cap = cap_of(request.home).value_or(0);
  const bool hard = budgets[static_cast<std::size_t>(request.home.index)].hard;
  const std::size_t share = hard ? std::min(cap, kMaxUnderCap) : kMediumSegment;
  const bool leaves = hard && cap >= kLeastForSmall && ledger.reserved_bytes(request.home, PoolKind::kSmall) == 0;
  const std::size_t taken = this->taken(request.home.index) + (leaves ? kSmallSegment : 0);
  const std::size_t left = taken < cap ? cap - taken : 0;
  return std::max({own, round_down(std::min(left, share), kLargeGranularity), least_shared_segment});
}

bool CachingManagedAllocator::State::has_free(Location home, std::size_t bytes) const {
  if (home.is_host() || !options.populate || !managed) {
    return true;
  }
  try {
    return runtime.memory_info(home.index).free >= bytes;
  } catch (const RuntimeFailure&) {
    return false; // it does not say
  }
}

Block* CachingManagedAllocator::State::from_fresh_segment(const Request& request, Lock& lock,
                                                          std::optional<OutOfMemory>& refusal) {
  const std::size_t bytes = new_segment_bytes(request);
  if (Block* const block = from_new_segment(request, bytes, lock, refusal)) {
    return block;
  }
  const std::size_t own = round_up(request.bytes, kLargeGranularity);
  return own < bytes && refusal ? from_new_segment(request, own, lock, refusal) : nullptr;
}

} // namespace torch_uvm
