// Idle devices: programs that fit into the budget run without the engine's overhead.
//
// Each dispatcher call is slower while a PyTorch callback is registered, and that costs more than the callback's own
// work. So a device becomes idle once its steps have repeated for a while without evictions, with nothing on the host
// and with memory to spare; or, after a longer while, if memory did not rise. Records are kept, and the destruction of
// storages is still reported.
//
// The device wakes if more is allocated than was ever used in that time, which is still well below the budget, or if
// the allocator runs out of room. It is not quiescent then: operators that began unwatched may hold pointers and may
// have queued work on unknown streams. Nothing is evicted until they have ended, which is known once the only
// Python thread is between operators (note_between_operators), or once enough operators have begun. Storages created
// while the device was idle have no record until operators use them, and stay. So a device becomes idle only if they
// leave half of the budget to what can be evicted.
#include <algorithm>

#include "residency/engine/engine.h"
#include "residency/engine/relocation_min.h"

namespace torch_uvm {
namespace {

constexpr std::uint64_t kQuietSteps = 2; ///< quiet steps before a device first becomes idle; doubles each time
constexpr unsigned kMaxDoublings = 6;
/// Number of operators without evictions and without more memory than before, after which a device becomes idle even if
/// no step repeats, or if no operator uses a storage that could be moved. Doubles likewise.
constexpr std::uint64_t kStill = 16384;
constexpr std::uint64_t kMissesShare = 32; ///< at most 1/32 of the operators may miss the schedule
constexpr std::size_t kSpareShare = 8; ///< steps must leave 1/8 of the cap free
constexpr std::size_t kSlackShare = 16; ///< an idle device wakes at 1/16 above the steps' peak
constexpr std::size_t kUnseenShare = 2; ///< when it wakes, at most 1/2 of the cap may lack a record

/// Weighted count of operators after which all operators from before the wake-up are assumed to have ended. Used if
/// running kernels are not counted (StorageAdapter). An operator that is certainly outermost adds `kSurely`, others 1.
constexpr unsigned kQuiescentAfter = 512;
constexpr unsigned kSurely = 128;

} // namespace

void Engine::become_idle_if_quiet(int index) {
  Device& device = state_.of(index);
  QuietPeriod& quiet = device.quiet;
  if (state_.operators < quiet.next_look) {
    return;
  }
  quiet.next_look = state_.operators + QuietPeriod::kMin;
  if (quiet.rooms != state_.statistics.made_room.count || quiet.write_backs != device.write_backs_started) {
    quiet.rooms = state_.statistics.made_room.count;
    quiet.write_backs = device.write_backs_started;
    quiet.peak = quiet.level = 0;
    device.restart_quiet(state_.operators);
    return;
  }
  const unsigned doublings = std::min(quiet.idle_periods, kMaxDoublings);
  if (state_.operators - quiet.still_since < kStill << doublings) {
    const std::uint64_t length = device.loops.step_length();
    const std::uint64_t quietly = state_.operators - quiet.since;
    const std::uint64_t misses = device.loops.sum(&Policy::Counters::plan_misses);
    if (length == 0 || quietly < length * (kQuietSteps << doublings)) {
      return;
    }
    if ((misses - quiet.misses) * kMissesShare > quietly) {
      quiet.since = state_.operators;
      quiet.misses = misses;
      return;
    }
  }
  if (!make_idle(index)) {
    device.restart_quiet(state_.operators); // do not repeat the checks at every look
  }
}

void Engine::look_for_quiet_devices() {
  for (int index = 0; state_.operators % QuietPeriod::kMin == 0 && index < static_cast<int>(state_.devices.size());
       ++index) {
    Device& device = state_.of(index);
    if (state_.watches(index) && device.running == 0) { // else its own operators look
      static_assert(kSurely <= QuietPeriod::kMin);
      if (!device.quiescent) {
        count_since_wake(index, /*surely_outermost=*/true); // for all that began since the last look
      }
      if (device.excess && device.quiescent) {
        retry_budget(index);
      }
      device.note_level(static_cast<std::size_t>(state_.take_allocated_peak(index)), state_.operators);
      become_idle_if_quiet(index);
    }
  }
}

bool Engine::leaves_room(const Device& device, std::size_t alarm) {
  return alarm <= device.cap - device.cap / kSpareShare;
}

bool Engine::make_idle(int index) {
  Device& device = state_.of(index);
  QuietPeriod& quiet = device.quiet;
  const std::size_t alarm = quiet.peak + std::max(quiet.peak / kSlackShare, relocation_min());
  if (!leaves_room(device, alarm) || device.excess || !device.quiescent || state_.recorder || evicts_after_operators_ ||
      device.running != 0 || stays_awake_.load() || quiet.overlap > quiet.since) {
    return false;
  }
  std::size_t known = 0;
  std::size_t lasting = 0; // the part that has outlived the quiet period, and so its steps
  for (const auto& [id, record] : state_.records) {
    if (record->device == index) {
      if (record->points_at == Side::kHost) {
        return false;
      }
      const std::size_t bytes = state_.memory.bytes(record->device_block);
      known += bytes;
      lasting += record->adopted <= quiet.still_since ? bytes : 0;
    }
  }
  if (alarm - std::min(alarm, lasting) > device.cap / kUnseenShare) {
    return false;
  }
  for (const auto& [id, record] : state_.records) {
    if (record->device == index && record->host_block != nullptr) {
      copies_.drop_host_copy(*record); // it would become stale: writes to the device copy will not be watched
    }
  }
  device.pending.clear();
  device.unforeseen.clear();
  device.retired.clear();
  const std::size_t allocated = state_.allocated_bytes(index);
  quiet.other = allocated - std::min(allocated, known);
  quiet.alarm = alarm;
  device.idle = true;
  device.quiescent = false;
  note_awake();
  return true;
}

void Engine::note_allocation(int device) {
  // Without the engine's lock: each allocation of an idle device comes here.
  if (has_idle_devices() && state_.allocated_bytes(device) > state_.of(device).alarm.load(std::memory_order_relaxed)) {
    wake(device);
  }
}

void Engine::wake(int device) {
  {
    const Lock lock(*this);
    if (!state_.of(device).idle) {
      return;
    }
    state_.of(device).idle = false;
    state_.of(device).quiescent = false;
    note_awake();
  }
  state_.storages.wake();
}

void Engine::wake_idle_devices() {
  for (int device = 0; has_idle_devices() && device < static_cast<int>(state_.devices.size()); ++device) {
    if (state_.of(device).alarm.load(std::memory_order_relaxed) != Device::kNever) {
      wake(device);
    }
  }
}

bool Engine::may_run_unseen(const Device& device) const {
  const std::optional<int> running = state_.storages.unwatched_kernels();
  return (running ? *running != 0 : device.quiet.seen < kQuiescentAfter) || unseen_graphs_.load() != 0 ||
         has_open_captures();
}

void Engine::count_since_wake(int index, bool surely_outermost) {
  Device& device = state_.of(index);
  device.quiet.seen += surely_outermost ? kSurely : 1;
  if (!may_run_unseen(device)) {
    note_quiescent(index);
  }
}

void Engine::note_between_operators() noexcept {
  try {
    const Lock lock(*this);
    for (int index = 0; may_run_unwatched() && index < static_cast<int>(state_.devices.size()); ++index) {
      Device& device = state_.of(index);
      if (state_.watches(index) && !device.quiescent) {
        device.quiet.seen = kQuiescentAfter - 1;
        count_since_wake(index, /*surely_outermost=*/false);
      }
    }
  } catch (...) {
    ++state_.failures; // the device failed; operators report it
  }
}

void Engine::note_quiescent(int index) {
  Device& device = state_.of(index);
  state_.runtime.synchronize_device(index); // work queued on unknown streams
  device.quiescent = true;
  const unsigned idle_periods = device.quiet.idle_periods + (device.quiet.alarm != 0 ? 1 : 0);
  std::size_t known = 0;
  for (const auto& [id, record] : state_.records) {
    known += record->device == index ? state_.memory.bytes(record->device_block) : 0;
  }
  const std::size_t allocated = state_.allocated_bytes(index);
  const std::size_t other = device.quiet.other;
  device.quiet = QuietPeriod{};
  device.quiet.idle_periods = idle_periods;
  device.quiet.other = other;
  device.quiet.unseen = allocated - std::min(allocated, known + other);
  device.excess = true; // possibly; checked when this operator ends
  note_awake();
  device.restart_quiet(state_.operators);
}

} // namespace torch_uvm
