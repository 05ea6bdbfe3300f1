// Idle devices: programs that fit into the budget run without the engine's overhead.
//
// Each dispatcher call is slower while a PyTorch callback is registered, and that costs more than the callback's own
// work. So a device becomes idle once its steps have repeated for a while without evictions, with nothing on the host
// and with memory to spare; or, after a longer while, if memory did not rise. Records are kept, and the destruction of
// storages is still reported.
//
// The device wakes if more is allocated than was ever used in that time, which is still well below the budget, or if
// the allocator runs out of room. It is not quiescent then: operators that began unwatched may hold pointers and may
// have queued work on unknown streams. Nothing is evicted until they have ended. Allocations that cannot wait exceed
// the budget.
#include <algorithm>

#include "residency/engine/residency_engine.h"

namespace torch_uvm {
namespace {

constexpr std::uint64_t kQuietSteps = 2; ///< quiet steps before a device first becomes idle; doubles each time
constexpr unsigned kMaxDoublings = 6;
constexpr std::uint64_t kMinQuiet = 128; ///< minimum number of quiet operators, however short the step
/// Number of operators without evictions and without more memory than before, after which a device becomes idle even if
/// no step repeats, or if no operator uses a storage that could be moved. Doubles likewise.
constexpr std::uint64_t kStill = 16384;
constexpr std::uint64_t kMissesShare = 32; ///< at most 1/32 of the operators may miss the schedule
constexpr std::size_t kSpareShare = 8; ///< steps must leave 1/8 of the cap free
constexpr std::size_t kSlackShare = 16; ///< an idle device wakes at 1/16 above the steps' peak
constexpr std::size_t kRiseShare = 64; ///< a rise of up to 1/64 of the allocated bytes still counts as quiet

/// Weighted count of operators after which all operators from before the wake-up are assumed to have ended. Used if
/// running kernels are not counted (StorageAdapter). An operator that is certainly outermost adds `kSurely`, others 1.
constexpr unsigned kQuiescentAfter = 512;
constexpr unsigned kSurely = 128;

} // namespace

void ResidencyEngine::note_level(Device& device, std::size_t bytes) {
  QuietPeriod& quiet = device.quiet;
  quiet.peak = std::max(quiet.peak, bytes);
  // Tolerate slow growth, for example from steps that each append their loss to a list.
  if (bytes > quiet.level + std::max(quiet.level / kRiseShare, relocation_min())) {
    quiet.level = bytes;
    restart_quiet(device);
  }
}

void ResidencyEngine::restart_quiet(Device& device) {
  device.quiet.since = device.quiet.still_since = operators_;
  device.quiet.next_look = operators_ + kMinQuiet;
  device.quiet.misses = device.policy->counters().plan_misses;
}

void ResidencyEngine::become_idle_if_quiet(int index) {
  Device& device = of(index);
  QuietPeriod& quiet = device.quiet;
  if (operators_ < quiet.next_look) {
    return;
  }
  quiet.next_look = operators_ + kMinQuiet;
  if (quiet.rooms != statistics_.made_room.count || quiet.write_backs != device.write_backs_started) {
    quiet.rooms = statistics_.made_room.count;
    quiet.write_backs = device.write_backs_started;
    quiet.peak = quiet.level = 0;
    restart_quiet(device);
    return;
  }
  const unsigned doublings = std::min(quiet.idle_periods, kMaxDoublings);
  if (operators_ - quiet.still_since < kStill << doublings) {
    const std::uint64_t length = device.policy->step_length();
    const std::uint64_t quietly = operators_ - quiet.since;
    const std::uint64_t misses = device.policy->counters().plan_misses;
    if (length == 0 || quietly < length * (kQuietSteps << doublings)) {
      return;
    }
    if ((misses - quiet.misses) * kMissesShare > quietly) {
      quiet.since = operators_;
      quiet.misses = misses;
      return;
    }
  }
  if (!make_idle(index)) {
    restart_quiet(device); // do not repeat the checks at every look
  }
}

void ResidencyEngine::look_for_quiet_devices() {
  for (int index = 0; operators_ % kMinQuiet == 0 && index < static_cast<int>(devices_.size()); ++index) {
    Device& device = of(index);
    if (watches(index) && device.running == 0) { // else its own operators look
      note_level(device, static_cast<std::size_t>(take_allocated_peak(index)));
      become_idle_if_quiet(index);
    }
  }
}

bool ResidencyEngine::make_idle(int index) {
  Device& device = of(index);
  QuietPeriod& quiet = device.quiet;
  const std::size_t alarm = quiet.peak + std::max(quiet.peak / kSlackShare, relocation_min());
  if (alarm > device.cap - device.cap / kSpareShare || device.excess || !device.quiescent || recorder_ ||
      evicts_after_operators_ || device.running != 0 || stays_awake_.load() || quiet.overlap > quiet.since) {
    return false;
  }
  std::size_t known = 0;
  for (const auto& [id, record] : records_) {
    if (record->device == index) {
      if (record->points_at == Side::kHost) {
        return false;
      }
      known += memory_.bytes(record->device_block);
    }
  }
  for (const auto& [id, record] : records_) {
    if (record->device == index && record->host_block != nullptr) {
      drop_host_copy(*record); // it would become stale: writes to the device copy will not be watched
    }
  }
  device.pending.clear();
  device.unforeseen.clear();
  device.retired.clear();
  const std::size_t allocated = allocated_bytes(index);
  quiet.other = allocated - std::min(allocated, known);
  quiet.alarm = alarm;
  device.idle = true;
  device.quiescent = false;
  note_awake();
  return true;
}

std::size_t ResidencyEngine::allocated_bytes(int device) const {
  return static_cast<std::size_t>(memory_.levels(Location::device(device)).allocated_bytes[0]);
}

void ResidencyEngine::note_allocation(int device) {
  // Without the engine's lock: each allocation of an idle device comes here.
  if (has_idle_devices() && allocated_bytes(device) > of(device).alarm.load(std::memory_order_relaxed)) {
    wake(device);
  }
}

void ResidencyEngine::wake(int device) {
  {
    const Lock lock(*this);
    if (!of(device).idle) {
      return;
    }
    of(device).idle = false;
    of(device).quiescent = false; // also for a soft budget that has been idle from the start
    note_awake();
  }
  storages_.wake();
}

void ResidencyEngine::wake_idle_devices() {
  for (int device = 0; has_idle_devices() && device < static_cast<int>(devices_.size()); ++device) {
    bool is_idle = false;
    {
      const Lock lock(*this);
      is_idle = of(device).idle && of(device).quiet.alarm != 0;
    }
    if (is_idle) {
      wake(device);
    }
  }
}

bool ResidencyEngine::may_run_unseen(const Device& device) const {
  const std::optional<int> running = storages_.running_kernels();
  return (running ? *running != 0 : device.quiet.seen < kQuiescentAfter) || unseen_graphs_.load() != 0 ||
         has_open_captures();
}

void ResidencyEngine::count_since_wake(int index, bool surely_outermost) {
  Device& device = of(index);
  device.quiet.seen += surely_outermost ? kSurely : 1;
  if (!may_run_unseen(device)) {
    note_quiescent(index);
  }
}

void ResidencyEngine::note_quiescent(int index) {
  Device& device = of(index);
  runtime_.synchronize_device(index); // work queued on unknown streams
  device.quiescent = true;
  const unsigned idle_periods = device.quiet.idle_periods + (device.quiet.alarm != 0 ? 1 : 0);
  std::size_t known = 0;
  for (const auto& [id, record] : records_) {
    known += record->device == index ? memory_.bytes(record->device_block) : 0;
  }
  const std::size_t allocated = allocated_bytes(index);
  const std::size_t other = device.quiet.other;
  device.quiet = QuietPeriod{};
  device.quiet.idle_periods = idle_periods;
  device.quiet.other = other;
  device.quiet.unseen = allocated - std::min(allocated, known + other);
  device.excess = true; // possibly; checked when this operator ends
  note_awake();
  restart_quiet(device);
}

} // namespace torch_uvm
