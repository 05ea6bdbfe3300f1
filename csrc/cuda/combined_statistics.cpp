#include "cuda/combined_statistics.h"

#include <algorithm>
#include <limits>

namespace torch_uvm::cuda {
namespace {

using c10::CachingAllocator::Stat;
constexpr std::size_t kBytes = 3; // index of allocated_bytes in the order below
static_assert(kPoolKinds == static_cast<std::size_t>(c10::CachingAllocator::StatType::NUM_TYPES));

// Visits the arrays that native and managed statistics have in common, in a fixed order.
template <typename Visit>
void each_level(Visit visit) {
  visit(0, &DeviceStats::allocation, &Statistics::allocation, &Levels::allocation);
  visit(1, &DeviceStats::segment, &Statistics::segment, &Levels::segment);
  visit(2, &DeviceStats::active, &Statistics::active, &Levels::active);
  visit(3, &DeviceStats::allocated_bytes, &Statistics::allocated_bytes, &Levels::allocated_bytes);
  visit(4, &DeviceStats::reserved_bytes, &Statistics::reserved_bytes, &Levels::reserved_bytes);
  visit(5, &DeviceStats::active_bytes, &Statistics::active_bytes, &Levels::active_bytes);
  visit(6, &DeviceStats::requested_bytes, &Statistics::requested_bytes, &Levels::requested_bytes);
}

Levels levels_of(const Statistics& statistics) {
  Levels levels;
  each_level([&](std::size_t, auto, auto ours, auto now) {
    for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
      (levels.*now)[kind] = (statistics.*ours)[kind].current;
    }
  });
  return levels;
}

void add_array(c10::CachingAllocator::StatArray& to, const StatArray& from) {
  for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
    to[kind].current += from[kind].current;
    to[kind].peak += from[kind].peak;
    to[kind].allocated += from[kind].allocated;
    to[kind].freed += from[kind].freed;
  }
}

} // namespace

std::int64_t CombinedStatistics::at_most(std::size_t bytes) {
  // The native allocator rounds up to 512 bytes, and does not split a large block if less than 1 MiB would be left.
  constexpr std::size_t kGranularity = 512;
  constexpr std::size_t kUnsplit = std::size_t{1} << 20;
  const std::size_t most =
      bytes <= kUnsplit ? (bytes + kGranularity - 1) / kGranularity * kGranularity : bytes + kUnsplit;
  return static_cast<std::int64_t>(most);
}

bool CombinedStatistics::exceeds(const Device& known, const Levels& managed) {
  const std::int64_t grown = known.grown.load(std::memory_order_relaxed);
  bool higher = !known.read || known.native[kBytes][0] + grown + managed.allocated_bytes[0] > known.peak[kBytes][0];
  each_level([&](std::size_t level, auto, auto, auto now) {
    for (std::size_t kind = 0; kind < kPoolKinds; ++kind) { // branchless: this is on the path of every allocation
      higher |= known.native[level][kind] + (managed.*now)[kind] > known.peak[level][kind];
    }
  });
  return higher;
}

void CombinedStatistics::take(Device& known, const Levels& managed, const DeviceStats& native) {
  known.read = true;
  each_level([&](std::size_t level, auto theirs, auto, auto now) {
    for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
      known.native[level][kind] = (native.*theirs)[kind].current;
      const std::int64_t sum = known.native[level][kind] + (managed.*now)[kind];
      known.peak[level][kind] = std::max(known.peak[level][kind], sum);
    }
  });
}

void CombinedStatistics::set_room(Device& known, const Levels& managed) {
  const std::int64_t used = managed.allocated_bytes[0];
  // With no managed block in use, the native allocator's own peaks suffice.
  known.room.store(
      used == 0 ? std::numeric_limits<std::int64_t>::max() : known.peak[kBytes][0] - known.native[kBytes][0] - used,
      std::memory_order_relaxed);
}

void CombinedStatistics::add(c10::DeviceIndex device, DeviceStats& native, const Statistics& managed) {
  const std::lock_guard lock(mutex_);
  Device& known = of(device);
  known.grown.store(0, std::memory_order_relaxed);
  const Levels levels = levels_of(managed);
  take(known, levels, native);
  set_room(known, levels);
  add_array(native.inactive_split, managed.inactive_split);
  add_array(native.inactive_split_bytes, managed.inactive_split_bytes);
  each_level([&](std::size_t level, auto theirs, auto ours, auto) {
    for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
      Stat& stat = (native.*theirs)[kind];
      const auto& added = (managed.*ours)[kind];
      // Includes native peaks from before the first managed allocation.
      stat.peak = std::max(stat.peak, known.peak[level][kind]);
      stat.current += added.current;
      stat.allocated += added.allocated;
      stat.freed += added.freed;
    }
  });
  native.num_alloc_retries += managed.num_alloc_retries;
  native.num_ooms += managed.num_ooms;
  native.num_sync_all_streams += managed.num_sync_all_streams;
  native.num_device_alloc += managed.num_device_alloc;
  native.num_device_free += managed.num_device_free;
}

void CombinedStatistics::reset_peaks(c10::DeviceIndex device, const DeviceStats& native, const Levels& managed) {
  const std::lock_guard lock(mutex_);
  Device& known = of(device);
  known.peak = {};
  known.grown.store(0, std::memory_order_relaxed);
  take(known, managed, native);
  set_room(known, managed);
}

} // namespace torch_uvm::cuda
