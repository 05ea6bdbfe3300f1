// Carries out the policy's decisions after an operator: write-backs, and fetches ahead of the next uses.
#include <algorithm>
#include <cmath>

#include "residency/engine/engine.h"

namespace torch_uvm {
namespace {

/// Maximum number of operators between two searches for room for the next prefetch.
constexpr unsigned kLongestPause = 31;

/// Number of operators before its use at which a storage that was evicted off schedule is fetched again. An earlier
/// fetch takes room that was already short; a later one queues behind the scheduled prefetches. In modelled time 64 to
/// 256 perform alike; 32 is worse if many fetches are queued. In a short iteration at most 1/8 of it: there each such
/// fetch would be so early that others are evicted off schedule for it, again and again.
constexpr std::uint64_t kSoon = 128, kSoonShare = 8;

/// At most 1/3 of the cap may be prefetched and not used yet. That keeps the link busy; prefetching more fills the
/// memory and leaves no contiguous room for large results. In modelled time 1/5 to 1/3 perform alike. Without a bound
/// steps take up to a third longer; with 1/10 the link goes idle.
constexpr std::size_t kAheadShare = 3;

} // namespace

void Engine::follow(const Decision& decision, int index) {
  Device& device = state_.of(index);
  if (decision.forget) {
    forget_fetches(device);
  }
  if (decision.retire.empty() && decision.write_back.empty() && decision.fetch.empty() && device.retired.empty() &&
      device.pending.empty() && device.unforeseen.empty()) {
    return; // most operators
  }
  for (const StorageId id : decision.fetch) {
    device.pending.push_back({id, state_.operators});
  }
  const std::uint64_t before = device.write_backs_started; // those started now wait for the operator
  write_back(decision, index);
  release_read_copies(index, before);
  queue_unforeseen_fetches(index);
  start_pending_fetches(index, !decision.retire.empty() || !decision.fetch.empty());
}

void Engine::write_back(const Decision& decision, int index) {
  Device& device = state_.of(index);
  const Copies::AfterOperator after(copies_, device.last_stream);
  for (const StorageId id : decision.write_back) {
    Record* const record = leaving(id);
    if (record != nullptr && !record->host_valid) {
      copies_.start_write_back(*record);
    }
  }
  for (const StorageId id : decision.retire) {
    Record* const record = leaving(id);
    if (record == nullptr || !(record->host_valid || copies_.start_write_back(*record))) {
      continue;
    }
    // What has used it since its bytes were written back must not be waited for longer than necessary.
    if ((!record->block_ready || copies_.is_used_since(*record)) && !state_.is_read(*record)) {
      copies_.note_last_use(*record);
    }
    record->retiring = true;
    record->retirement = ++device.retirements;
    device.retired.push_back({id, record->retirement});
  }
}

Record* Engine::leaving(StorageId id) {
  Record* const record = state_.find(id);
  if (record == nullptr || record->points_at != Side::kDevice || !state_.address_may_change(*record, Mover::kEngine)) {
    return nullptr;
  }
  copies_.take_sole_ownership(*record);
  return record;
}

void Engine::release_read_copies(int index, std::uint64_t latest) {
  Device& device = state_.of(index);
  while (!device.retired.empty()) {
    Record* const record = room_.retiring(device.retired.front());
    const bool unused = record != nullptr && record->in_use == 0;
    if (unused && (record->write_back > latest || !state_.is_read(*record))) {
      return;
    }
    device.retired.pop_front(); // before the release: if it fails, it is not tried after each operator
    if (unused && std::isfinite(room_.cost_of(*record, Need::kAhead))) {
      copies_.release_device_copy(*record, device.last_stream);
    }
  }
}

Record* Engine::wanted(const Device::Fetch& pending) const {
  Record* const record = state_.find(pending.storage);
  if (record == nullptr || record->last_use > pending.asked) {
    return nullptr; // it was fetched by the operator itself, and may have left again since
  }
  // A collective may still write to the host copy, on a stream that is not known.
  const bool may = record->points_at == Side::kHost && !record->fetching() && record->captured == 0;
  return may && !record->collective ? record : nullptr;
}

bool Engine::may_fetch_ahead(const Device& device, std::size_t bytes) {
  return device.fetched_ahead == 0 || device.fetched_ahead + bytes <= device.cap / kAheadShare;
}

void Engine::forget_fetches(Device& device) noexcept {
  device.pending.clear();
  device.fetched_ahead = 0;
  ++device.fetch_round;
}

void Engine::start_pending_fetches(int index, bool changed) {
  Device& device = state_.of(index);
  if (changed) {
    device.pause = 0;
  } else if (device.pause > 0) {
    --device.pause; // a search for room costs more than an operator, so not after each one
    return;
  }
  while (!device.pending.empty()) {
    if (Record* const record = wanted(device.pending.front())) {
      if (!may_fetch_ahead(device, record->bytes)) {
        return; // until a prefetched storage is used or its fetch abandoned
      }
      // Unless the fetch starts: no room yet, a running operator uses it on the host, or the runtime failed.
      device.next_pause = std::min(2 * device.next_pause + 1, kLongestPause);
      device.pause = device.next_pause;
      if (record->in_use != 0 || !copies_.start_fetch(*record, Need::kAhead, device.fetches)) {
        return;
      }
      device.pause = 0;
    }
    device.next_pause = 0;
    device.pending.pop_front();
  }
}

void Engine::queue_unforeseen_fetches(int index) {
  Device& device = state_.of(index);
  if (device.unforeseen.empty()) {
    return;
  }
  const auto next_use = [&](const Record& record) { return state_.policy_of(record).next_use_on_device(record.id); };
  const std::uint64_t length = device.loops.step_length();
  const std::uint64_t soon = length == 0 ? kSoon : std::clamp<std::uint64_t>(length / kSoonShare, 1, kSoon);
  while (!device.unforeseen.empty() && device.unforeseen.begin()->first <= state_.operators + soon) {
    const StorageId id = device.unforeseen.extract(device.unforeseen.begin()).mapped();
    const Record* const record = state_.find(id);
    if (record == nullptr || record->points_at == Side::kDevice || record->fetching()) {
      continue;
    }
    const double next = next_use(*record); // the schedule may have changed
    if (!std::isfinite(next)) {
      continue;
    }
    if (next > static_cast<double>(soon)) {
      state_.fetch_again(*record);
      continue;
    }
    const auto later = std::ranges::find_if(device.pending, [&](const Device::Fetch& pending) {
      const Record* const other = state_.find(pending.storage);
      return other == nullptr || next_use(*other) > next;
    });
    device.pending.insert(later, {id, state_.operators});
    device.pause = 0;
  }
}

} // namespace torch_uvm
