// Caps on a device's segments (the engine's budget). A segment under a cap is made with the lock held, so that two
// threads cannot both take the last bytes.
#include <algorithm>
#include <vector>

#include "allocator/caching/state.h"
#include "allocator/invariants.h"

namespace torch_uvm {

bool CachingManagedAllocator::State::cap_allows(Location home, std::size_t bytes, bool over_cap) const {
  if (!cap_of(home)) {
    return true;
  }
  const DeviceCap& budget = caps[static_cast<std::size_t>(home.index)];
  const std::size_t most = over_cap ? budget.ceiling : *budget.cap;
  const std::size_t taken = this->taken(home.index);
  return taken <= most && bytes <= most - taken;
}

void CachingManagedAllocator::State::note_segment(Location home, std::size_t bytes) noexcept {
  if (home.is_host()) {
    return;
  }
  DeviceCap& budget = caps[static_cast<std::size_t>(home.index)];
  budget.refused = false;
  if (const std::size_t all = taken(home.index) + bytes; budget.cap && all > *budget.cap) {
    budget.most = std::max(budget.most, all);
    pool_statistics.count(PoolStatistics::k_num_over_cap, home);
  }
}

void CachingManagedAllocator::State::check_device(int device) const {
  if (device < 0 || device >= devices) {
    throw InvalidArgument("device " + std::to_string(device) + "; there are " + std::to_string(devices) + " devices");
  }
}

Block* CachingManagedAllocator::State::within_cap(const Request& request, Lock& lock,
                                                  std::optional<OutOfMemory>& refusal) {
  if (Block* const block = from_cache(request, lock)) {
    return block;
  }
  refusal.reset();
  if (Block* const block = from_fresh_segment(request, lock, refusal)) {
    return block;
  }
  return merged_within_cap(request, lock, refusal);
}

Block* CachingManagedAllocator::State::merged_within_cap(const Request& request, Lock& lock,
                                                         std::optional<OutOfMemory>& refusal) {
  if (Block* const block = from_run(request, lock)) {
    return block;
  }
  const std::size_t own = round_up(request.bytes, kLargeGranularity);
  if (!fit_under_cap(request, own)) {
    return nullptr;
  }
  return from_new_segment(request, own, lock, refusal);
}

bool CachingManagedAllocator::State::may_exceed_cap(const Request& request, std::size_t segment_bytes, Lock& lock) {
  PressureCallback* const callback = pressure_callback;
  const std::size_t taken = this->taken(request.home.index);
  const std::size_t ceiling = caps[static_cast<std::size_t>(request.home.index)].ceiling;
  if (callback == nullptr || taken > ceiling || segment_bytes > ceiling - taken) {
    return false;
  }
  const Unlocked unlocked(lock);
  return callback->may_exceed(request.bytes, request.home);
}

OutOfMemory CachingManagedAllocator::State::cap_refusal(const Request& request) const {
  return OutOfMemory(OutOfMemory::Cause::kBudget, request.bytes,
                     "The budget of " + to_string(request.home) + " is " +
                         format_bytes(cap_of(request.home).value_or(0)) + ", of which segments take " +
                         format_bytes(taken(request.home.index)) + ", and nothing more could be released or evicted");
}

std::size_t CachingManagedAllocator::State::excess(Location home, SizeClass kind, std::size_t bytes) const {
  const auto& cap = cap_of(home);
  const std::size_t all = cap ? taken(home.index) + bytes + left_for_small(home, kind, bytes) : 0;
  return all > cap.value_or(0) ? all - *cap : 0;
}

bool CachingManagedAllocator::State::fit_under_cap(const Request& request, std::size_t bytes) {
  const std::size_t excess = this->excess(request.home, request.kind, bytes);
  if (excess == 0) {
    return true;
  }
  Heap::Segments& segments = heap.segments();
  std::vector<Heap::Segments::iterator> unused;
  std::size_t free = 0;
  for (auto segment = segments.begin(); segment != segments.end(); ++segment) {
    if (segment->second.used == 0 && segment->second.home == request.home) {
      unused.push_back(segment);
      free += segment->second.bytes;
    }
  }
  if (!unused.empty() && !streams_are_idle(request.home.index)) { // their release waits
    if (!request.may_wait) {
      return false;
    }
    std::ranges::sort(unused, {}, [](const auto& segment) { return segment->second.unused_since; });
    std::size_t oldest = 0;
    for (free = 0; free < excess && oldest < unused.size(); ++oldest) {
      free += unused[oldest]->second.bytes;
    }
    unused.resize(oldest);
  }
  if (free < excess) {
    return false;
  }
  // Release the smallest segment that is large enough alone; if there is none, release from the largest down.
  std::ranges::sort(unused, {}, [](const auto& segment) { return segment->second.bytes; });
  const auto alone =
      std::ranges::lower_bound(unused, excess, {}, [](const auto& segment) { return segment->second.bytes; });
  if (alone != unused.end()) {
    release(*alone);
    return true;
  }
  for (std::size_t freed = 0; freed < excess; unused.pop_back()) {
    freed += unused.back()->second.bytes;
    release(unused.back());
  }
  return true;
}

bool CachingManagedAllocator::State::streams_are_idle(int device) {
  std::vector<Stream> idle;
  for (const auto& [address, segment] : heap.segments()) {
    for (const Block* block = segment.first; segment.home == Location::device(device) && block != nullptr;
         block = block->after) {
      const Stream stream = block->free_list->stream;
      if (stream.is_host() || std::ranges::find(idle, stream) != idle.end()) {
        continue;
      }
      if (!runtime.query_stream(stream)) {
        return false;
      }
      idle.push_back(stream);
    }
  }
  return true;
}

void CachingManagedAllocator::leave_none_for_small(int device) {
  const std::lock_guard lock(state_->mutex);
  state_->check_device(device);
  state_->caps[static_cast<std::size_t>(device)].leaves_none = true;
}

void CachingManagedAllocator::set_cap(int device, std::optional<std::size_t> bytes, std::size_t ceiling) {
  State& state = *state_;
  state.check_device(device);
  const std::lock_guard lock(state.mutex);
  const WalkAfterwards walk(state);
  DeviceCap& budget = state.caps[static_cast<std::size_t>(device)];
  budget.leaves_none = budget.leaves_none && budget.cap == bytes;
  budget.cap = bytes;
  budget.ceiling = std::max(ceiling, bytes.value_or(0));
  budget.most = std::max(bytes.value_or(0), state.taken(device));
  if (state.in_forked_child || !bytes) {
    return;
  }
  state.release(Location::device(device), *bytes);
  if (state.taken(device) > *bytes) {
    state.wait_for_pending();
    state.release(Location::device(device), *bytes);
  }
}

std::optional<std::size_t> CachingManagedAllocator::cap(int device) const {
  state_->check_device(device);
  const std::lock_guard lock(state_->mutex);
  return state_->caps[static_cast<std::size_t>(device)].cap;
}

std::size_t CachingManagedAllocator::unused(int device) const {
  const State& state = *state_;
  state.check_device(device);
  const Location home = Location::device(device);
  const std::lock_guard lock(state.mutex);
  const std::size_t cap = state.cap_of(home).value_or(0);
  if (cap == 0) {
    return 0;
  }
  const PoolStatistics& now = state.pool_statistics;
  const std::size_t taken = now.reserved_bytes(home) + state.left_for_small(home, SizeClass::kLarge, 0);
  return now.reserved_bytes(home, PoolKind::kLarge) - now.active_bytes(home, PoolKind::kLarge) + cap -
         std::min(cap, taken);
}

CachingManagedAllocator::AllocatedPeak CachingManagedAllocator::take_allocated_peak(int device) {
  state_->check_device(device);
  const Location home = Location::device(device);
  const std::lock_guard lock(state_->mutex);
  const auto most = static_cast<std::size_t>(state_->pool_statistics.take_allocated_peak(home));
  return {most, static_cast<std::size_t>(state_->pool_statistics.allocated_bytes(home)),
          state_->pool_statistics.allocation_changes(home)};
}

std::uint64_t CachingManagedAllocator::allocation_changes(int device) const noexcept {
  return state_->pool_statistics.allocation_changes(Location::device(device));
}

Block* CachingManagedAllocator::try_allocate(std::size_t bytes, Location home, Stream stream, Try how) {
  State& state = *state_;
  state.check_location(home);
  state.check_stream(stream);
  if (bytes == 0) {
    return nullptr;
  }
  std::unique_lock lock(state.mutex);
  const WalkAfterwards walk(state);
  state.check_not_forked();
  if (bytes > kLargestRequest || (home.is_host() && !state.exclusive.empty())) {
    return nullptr; // allocate always waits for devices that exclude the host
  }
  Request request = state.request(bytes, home, stream);
  request.may_wait = how == Try::kWaiting;
  if (request.may_wait) {
    state.wait_for_pending();
  } else if (state.pending_first != nullptr) {
    state.poll_pending(false);
  }
  if (how == Try::kCached) {
    Block* const block = state.from_cache(request, lock);
    return block != nullptr ? block : state.from_run(request, lock);
  }
  std::optional<OutOfMemory> refusal;
  return state.within_cap(request, lock, refusal);
}

} // namespace torch_uvm
