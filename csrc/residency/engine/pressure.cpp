// What the allocator calls when memory runs short: makes room, or decides that a budget may be exceeded.
#include <algorithm>

#include "residency/engine/engine.h"
#include "residency/engine/relocation_min.h"
#include "residency/engine/shares.h"

namespace torch_uvm {
namespace {

/// Number of waits, up to 1 ms each, for blocks that other threads are about to free: enough for a preempted thread to
/// finish. Bounded, since that thread may need the GIL, which the requesting thread may hold.
constexpr int kMoments = 64;

} // namespace

bool Engine::may_exceed(std::size_t bytes, Location home) {
  if (home.is_host()) {
    return true;
  }
  const Lock lock(*this);
  Device& device = state_.of(home.index);
  if (!device.budget) {
    return true;
  }
  if (!device.quiescent) { // nothing can be evicted yet
    device.exceeded = true;
    ++state_.statistics.over_budget;
    return true;
  }
  std::size_t used = 0; // in use by running operators
  std::size_t evictable = 0; // 0 if pinned memory is exhausted
  std::size_t known = 0; // of storages with records
  for (const auto& [id, record] : state_.records) {
    if (record->device == home.index && record->device_block != nullptr) {
      const std::size_t bytes_of_block = state_.memory.bytes(record->device_block);
      known += bytes_of_block;
      if (record->in_use != 0) {
        used += bytes_of_block;
      } else if (state_.address_may_change(*record, Mover::kOperator) && !state_.is_unmovable(*record) &&
                 !state_.host_refused) {
        evictable += bytes_of_block;
      }
    }
  }
  const std::size_t allocated = state_.allocated_bytes(home.index);
  const std::size_t unknown = allocated - std::min(allocated, known);
  // Results of running operators have no record yet. Storages that are too small to move have none either: up to
  // 1/kBeyondShare of the cap they count as the operator's, or a request would fail where it exceeds a smaller budget.
  used += device.regions != 0 || device.running != 0 ? unknown : std::min(unknown, device.cap / kBeyondShare);
  // Storages created while the device was idle and not used since have no record yet. Count them as evictable.
  evictable += std::min(device.quiet.unseen, allocated - std::min(allocated, known + device.quiet.other));
  const std::size_t stays = allocated - std::min(allocated, evictable);
  // Fail if the bytes that must stay leave no room for the request, although the running operators alone would fit.
  // Otherwise exceed the cap: the bytes fit but the memory is fragmented, or the running operators alone need more.
  if (stays + bytes > device.cap && used + bytes <= device.cap) {
    return false;
  }
  device.exceeded = true;
  ++state_.statistics.over_budget;
  return true;
}

void Engine::waits_for_memory(Stream stream, const std::function<void()>& queue) {
  // Another thread that has the lock may be waiting for the allocator's, which this thread has.
  const bool mine = holder_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  std::unique_lock<std::mutex> lock(mutex_, std::defer_lock);
  if (stream.is_host() || !(mine || lock.try_lock())) {
    queue();
    return;
  }
  const EngineState::Untimed untimed(state_, stream);
  queue();
}

bool Engine::is_block_being_freed(int device) const {
  if (blocks_being_freed_.load(std::memory_order_relaxed) != 0) {
    return true;
  }
  for (const auto& [id, record] : state_.records) {
    if (record->device == device && record->device_block != nullptr && record->pins == 0 &&
        state_.storages.is_expired(*record)) { // a pinned one's block stays: another label has it
      return true;
    }
  }
  return false;
}

bool Engine::never_moves(std::size_t bytes) const {
  return bytes < relocation_min();
}

void Engine::make_room_for_small(std::size_t bytes, Location home, Stream stream) {
  const Lock lock(*this);
  try {
    if (!state_.of(home.index).budget) {
      return;
    }
    // Nothing moves for it if all fits. Nor in steps that repeat: these free what they make, and would move in each
    // step.
    const bool repeats = state_.of(home.index).loops.current().policy.counters().following;
    const bool moves = !repeats && std::ranges::any_of(state_.records, [&](const auto& known) {
      return known.second->device == home.index && known.second->points_at == Side::kHost;
    });
    if (moves) {
      room_.evict_first_fit(bytes, home.index, stream);
    }
  } catch (...) { // it finds another place
  }
}

bool Engine::make_room(std::size_t bytes, Location home, Stream stream) {
  if (home.is_host()) {
    return false;
  }
  bool wakes = false;
  bool made = false;
  try {
    Lock lock(*this);
    Device& device = state_.of(home.index);
    if (!device.budget) {
      return false;
    }
    state_.host_refused = false; // the host may have memory again
    if (device.idle) {
      // Storages created while idle get records as operators use them, so usually nothing can be evicted yet.
      device.idle = false;
      device.quiescent = false; // operators that run now were not watched
      note_awake();
      wakes = true;
    }
    const EngineState::OwnTime own(state_, home.index);
    const double began = state_.now_us();
    made = room_.use_held_or_evict(bytes, home.index, stream);
    for (int moment = 0; !made && moment < kMoments && device.budget && is_block_being_freed(home.index); ++moment) {
      lock.wait_for_a_block();
      made = room_.evict_range(bytes, home.index, Need::kNow, stream);
    }
    if (!made) {
      made = room_.evict_all(home.index, stream); // then unused segments can be released for a new one
    }
    ++state_.statistics.made_room.count;
    state_.statistics.made_room.bytes += made ? static_cast<std::int64_t>(bytes) : 0;
    state_.statistics.made_room.ms += (state_.now_us() - began) / 1e3;
  } catch (...) {
    made = false; // the runtime failed; the allocator reports the lack of memory
  }
  if (wakes) {
    state_.storages.wake();
  }
  return made;
}

} // namespace torch_uvm
