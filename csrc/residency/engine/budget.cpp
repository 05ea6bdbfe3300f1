// Sets budgets and staging, enforces them, and decides when a budget may be exceeded.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "residency/engine/engine.h"
#include "residency/engine/link_probe.h"
#include "residency/engine/shares.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Number of operators between the first two attempts to return to an exceeded budget, and at most: what is in the way,
/// such as a pin, may go at any time.
constexpr std::uint64_t kFirstShrinkPause = 64;
constexpr std::uint64_t kLongestShrinkPause = 1024;

/// How long lifting a budget waits for operators that use storages on the host.
constexpr std::chrono::seconds kLongestWait{30};

constexpr int kMaxUrgent = -1; ///< priority of the engine's streams

constexpr std::size_t kMaxStagedShare = 8; ///< all slots together get at most 1/8 of the budget, even if set by option

// The driver may commit managed memory in large steps. If rounding up to a step exceeds the budget by at most
// 1/kBeyondShare, the driver may do so. Otherwise the cap is rounded down to a step, unless that wastes more than 1/16
// of the budget.
constexpr std::size_t kUnusedShare = 16;

} // namespace

std::size_t Engine::cap_within(int device, std::size_t budget, std::size_t staged) const {
  const std::size_t cap = budget - staged, step = state_.runtime.device_properties(device).managed_step;
  const std::size_t whole = round_down(cap, step);
  const bool is_near = round_up(cap, step) - cap <= budget / kBeyondShare;
  return is_near || cap - whole > budget / kUnusedShare ? cap : whole;
}

std::size_t Engine::slot_bytes(int device, std::size_t budget) const {
  if (staging_) {
    return round_down(std::min(*staging_, budget / kMaxStagedShare / kStagingSlots), kSlotGranularity);
  }
  return state_.runtime.device_properties(device).managed_copies_overlap ? 0 : default_slot_bytes(budget);
}

void Engine::make_streams(int index, bool stages) {
  Device& device = state_.of(index);
  std::vector<Stream> made;
  try {
    const auto make = [&] {
      made.push_back(state_.runtime.create_stream(index, kMaxUrgent));
      return made.back();
    };
    const bool first = device.fetches.is_host();
    const Stream fetches = first ? make() : device.fetches;
    const Stream write_backs = first ? make() : device.write_backs;
    if (stages && !device.incoming) {
      auto incoming = std::make_unique<Staging>(state_.runtime, Staging::Direction::kToDevice, make());
      device.outgoing = std::make_unique<Staging>(state_.runtime, Staging::Direction::kToHost, make());
      device.incoming = std::move(incoming);
    }
    device.fetches = fetches;
    device.write_backs = write_backs;
  } catch (...) {
    std::ranges::for_each(made, [this](Stream stream) { state_.runtime.destroy_stream(stream); });
    throw;
  }
}

std::size_t Engine::stage(Device& device, std::size_t slot_bytes) noexcept {
  if (device.incoming) {
    device.incoming->resize(slot_bytes);
    device.outgoing->resize(slot_bytes);
  }
  return kStagingSlots * slot_bytes;
}

void Engine::set_staging(std::optional<std::size_t> slot_bytes) {
  const Lock lock(*this);
  staging_ = slot_bytes;
}

void Engine::set_budget(int device, std::optional<std::size_t> bytes, std::size_t ceiling) {
  if (device < 0 || device >= static_cast<int>(state_.devices.size())) {
    throw InvalidArgument("a budget for device " + std::to_string(device) + "; there are " +
                          std::to_string(state_.devices.size()) + " devices");
  }
  Lock lock(*this);
  Device& changed = state_.of(device);
  const std::size_t slot = bytes ? slot_bytes(device, *bytes) : 0;
  if (bytes) {
    make_streams(device, slot != 0);
    changed.loops.start();
  }
  if (bytes && !changed.timed && state_.runtime.device_properties(device).kernels_take_time) {
    changed.timed = true;
    changed.rates = measure_link(state_.runtime, changed.fetches, changed.write_backs);
  }
  if (!bytes && changed.budget) {
    state_.memory.set_cap(device, std::nullopt);
    try {
      bring_back(device, lock);
      // Later operators are not observed, so none of them waits for work of other streams, such as deferred updates.
      state_.runtime.synchronize_device(device);
    } catch (...) {
      state_.memory.set_cap(device, changed.cap, changed.ceiling);
      throw;
    }
  }
  const std::size_t staged = stage(changed, slot);
  changed.cap = bytes ? cap_within(device, *bytes, staged) : 0;
  changed.ceiling = std::max(changed.cap, ceiling - std::min(ceiling, staged));
  if (bytes) {
    PolicyOptions options;
    options.budget = changed.cap;
    options.reserve = changed.cap / kReserveShare;
    options.timed = changed.timed;
    options.rates = changed.rates;
    changed.loops.set_options(options);
    state_.memory.set_pressure_callback(this);
  }
  state_.memory.set_cap(device, bytes ? std::optional(changed.cap) : std::nullopt, changed.ceiling);
  const bool watched = changed.budget && !changed.idle;
  changed.budget = bytes;
  if (bytes && changed.idle && leaves_room(changed, changed.quiet.alarm)) {
    return; // it fits into the new budget as well
  }
  changed.idle = false;
  note_awake(); // before unwatched operators are counted, so that an operator is either counted or watched
  changed.quiescent = !bytes || (watched ? changed.quiescent : state_.allocated_bytes(device) == 0);
  if (bytes) {
    shrink(device);
  }
  changed.quiet = QuietPeriod{};
  changed.quiet.still_since = state_.operators;
  state_.take_allocated_peak(device); // discard the peak from before
  changed.excess = bytes && over_cap(device) != 0;
  state_.statistics.over_budget += changed.excess ? 1 : 0; // what cannot be evicted, or not yet, exceeds it
  changed.next_shrink = changed.shrink_pause = 0;
  if (!changed.quiescent && !changed.idle && !may_run_unseen(changed)) {
    note_quiescent(device);
  }
  note_awake();
}

void Engine::note_awake() {
  awake_.store(std::ranges::any_of(state_.devices, [](const Device& each) { return each.budget && !each.idle; }),
               std::memory_order_release);
  const auto is_idle = [](const Device& each) { return each.budget && each.idle && each.quiet.alarm != 0; };
  for (Device& each : state_.devices) {
    each.alarm.store(is_idle(each) ? each.quiet.alarm : Device::kNever, std::memory_order_relaxed);
  }
  idle_devices_.store(static_cast<int>(std::ranges::count_if(state_.devices, is_idle)), std::memory_order_relaxed);
  may_run_unwatched_.store(std::ranges::any_of(state_.devices, [](const Device& each) { return !each.quiescent; }),
                           std::memory_order_relaxed);
}

void Engine::bring_back(int device, Lock& lock) {
  const Stream fetches = state_.of(device).fetches;
  const auto began = std::chrono::steady_clock::now();
  for (bool waits = true; waits;) {
    waits = false;
    for (const auto& [id, record] : state_.records) {
      if (record->device != device || record->captured != 0 || record->storage == nullptr) {
        continue;
      }
      if (record->points_at == Side::kHost && !state_.address_may_change(*record, Mover::kOperator)) {
        waits = true;
        continue;
      }
      // To evict one storage for another would leave it on the host, where it is used unwatched.
      if (!copies_.bring_to_device(*record, fetches, Need::kToStay)) {
        if (state_.is_unmovable(*record)) {
          continue; // it is being destroyed, or Python alone owns it: no operator uses it now
        }
        throw OutOfMemory(OutOfMemory::Cause::kRuntime, record->bytes,
                          "no room on " + to_string(Location::device(device)) + " to bring back " +
                              format_bytes(record->bytes) + " that are on the host; the budget stays");
      }
      copies_.use_on_device(*record, fetches, false);
    }
    if (waits && std::chrono::steady_clock::now() - began > kLongestWait) {
      throw RuntimeFailure("an operator uses managed memory on the host and does not end; the budget of " +
                           to_string(Location::device(device)) + " stays");
    }
    if (waits) {
      lock.wait_for_a_block();
    }
  }
  state_.runtime.synchronize_stream(state_.of(device).write_backs);
  state_.runtime.synchronize_stream(fetches);
  if (state_.of(device).outgoing) {
    state_.runtime.synchronize_stream(state_.of(device).outgoing->link());
  }
  for (const auto& [id, record] : state_.records) {
    if (record->device == device && record->points_at == Side::kDevice && record->host_block != nullptr) {
      copies_.drop_host_copy(*record); // it would become stale: writes to the device copy will not be watched
      if (state_.memory.stream(record->device_block) == fetches && !record->owners.empty()) {
        copies_.note_owners(*record);
        state_.memory.hand_over(record->device_block, record->owners.front()); // so that freeing it takes no event
        copies_.record_owners(*record);
      }
    }
  }
}

std::size_t Engine::over_cap(int device) {
  const std::size_t reserved = state_.memory.reserved_bytes(Location::device(device));
  return reserved - std::min(reserved, state_.of(device).cap);
}

void Engine::shrink(int device) {
  if (over_cap(device) != 0) {
    state_.memory.empty_cache();
  }
  const std::size_t bytes = over_cap(device);
  if (bytes == 0) {
    return;
  }
  // If no segments suffice that can be emptied, then at least those that are in the way of less.
  for (std::size_t wanted = bytes; wanted != 0; wanted = std::min(wanted / 2, over_cap(device))) {
    for (void* const tag : state_.memory.min_cost_segments(wanted, device, room_.cost_of_block(Need::kNow))) {
      copies_.evict(*static_cast<Record*>(tag), Stream::host());
    }
    state_.memory.empty_cache();
  }
  if (over_cap(device) != 0 && state_.of(device).running == 0) { // something in each segment stays, or could not leave
    room_.evict_all(device, Stream::host());
    state_.memory.empty_cache();
  }
}

std::optional<std::size_t> Engine::budget(int device) const {
  const std::lock_guard lock(mutex_);
  return state_.devices.at(static_cast<std::size_t>(device)).budget;
}

void Engine::set_host_limit(std::optional<std::size_t> bytes) {
  state_.host_source->set_limit(bytes);
  if (bytes && state_.host_source->bytes() > *bytes) {
    state_.host_memory->empty_cache(); // cached memory would be reused without checking the limit
  }
}

void Engine::retry_budget(int index) {
  Device& device = state_.of(index);
  if (state_.operators < device.next_shrink) {
    return;
  }
  // Storages from before the wake-up or before the budget can be evicted only once operators have used them. So retry,
  // at growing intervals, since shrinking evicts everything and synchronises with the device. While other operators
  // run, it does neither, and what they hold is soon free.
  shrink(index);
  device.excess = over_cap(index) != 0;
  const std::uint64_t pause = device.running != 0 ? device.shrink_pause : 2 * device.shrink_pause;
  device.shrink_pause = device.excess ? std::clamp(pause, kFirstShrinkPause, kLongestShrinkPause) : 0;
  device.next_shrink = state_.operators + device.shrink_pause;
}

void Engine::release_excess(const Frame& frame, int device) {
  const auto again = [&] { state_.memory.set_cap(device, state_.of(device).cap, state_.of(device).ceiling); };
  again();
  if (over_cap(device) == 0) {
    return;
  }
  for (const auto& [id, bytes] : frame.births) {
    if (Record* const record = state_.find(id);
        record != nullptr && std::isfinite(room_.cost_of(*record, Need::kNow))) {
      copies_.evict(*record, Stream::host());
    }
  }
  again();
  if (over_cap(device) != 0) {
    state_.of(device).excess = true; // another thread's operators may hold what has to leave
    state_.of(device).next_shrink = state_.of(device).shrink_pause = 0;
  }
}

} // namespace torch_uvm
