// When nobody needs to be watched, and how that ends: steps that repeat and fit cost nothing.
//
// PyTorch's callback costs more than what is done in it: each call of the dispatcher is slower while there is one. So a
// device falls asleep once its steps have repeated for a while with nothing given up, nothing on the host, and room to
// spare. What was seen of its storages is kept, and their deaths are told all the while.
//
// It wakes where more is allocated than those steps ever had, well below the budget, or where the allocator is short.
// Then it has not settled: operators that nobody has seen begin may still hold pointers, and may have queued work on
// streams that nobody knows. Until they are over nothing is given up; what cannot wait for that exceeds the budget,
// as one operator alone may.
#include <algorithm>

#include "residency/engine/engine.h"

namespace torch_uvm {
namespace {

constexpr std::uint64_t kQuietSteps = 2; ///< before the first sleep; twice as many before each other
constexpr unsigned kMostDoublings = 6;
constexpr std::uint64_t kLeastQuiet = 128; ///< operators, however short the step
constexpr std::uint64_t kMissesShare = 32; ///< one in so many may come unplanned
constexpr std::size_t kSpareShare = 8; ///< of the budget, what steps have to leave free
constexpr std::size_t kSlackShare = 16; ///< of what steps have, what they may have more without waking anybody
constexpr std::size_t kRiseShare = 64; ///< of what steps have, what they may have more and count as quiet

/// Operators until all that ran when a device woke are over. One that surely is within no other counts for more.
constexpr unsigned kSettled = 512;
constexpr unsigned kSurely = 128;

} // namespace

void Engine::note_level(Device& device, std::size_t bytes) {
  Quiet& quiet = device.quiet;
  quiet.peak = std::max(quiet.peak, bytes);
  // Steps that keep a loss each have a little more every time, and are quiet all the same.
  if (bytes > quiet.level + std::max(quiet.level / kRiseShare, relocation_min())) {
    quiet.level = bytes;
    restart_quiet(device);
  }
}

void Engine::restart_quiet(Device& device) {
  device.quiet.since = operators_;
  device.quiet.next_look = operators_ + kLeastQuiet;
  device.quiet.misses = device.policy->counters().plan_misses;
}

void Engine::rest_if_quiet(int index) {
  Device& device = of(index);
  Quiet& quiet = device.quiet;
  if (operators_ < quiet.next_look) {
    return;
  }
  quiet.next_look = operators_ + kLeastQuiet;
  if (quiet.rooms != statistics_.made_room.count || quiet.write_backs != device.write_backs_started) {
    quiet.rooms = statistics_.made_room.count;
    quiet.write_backs = device.write_backs_started;
    quiet.peak = quiet.level = 0;
    restart_quiet(device);
    return;
  }
  const std::uint64_t length = device.policy->step_length();
  const std::uint64_t quietly = operators_ - quiet.since;
  const std::uint64_t missed = device.policy->counters().plan_misses - quiet.misses;
  if (length == 0 || quietly < length * (kQuietSteps << std::min(quiet.rests, kMostDoublings))) {
    return;
  }
  if (missed * kMissesShare > quietly) {
    restart_quiet(device);
    return;
  }
  if (!fall_asleep(index)) {
    restart_quiet(device); // what spoke against it is not looked for at every turn
  }
}

bool Engine::fall_asleep(int index) {
  Device& device = of(index);
  Quiet& quiet = device.quiet;
  const std::size_t alarm = quiet.peak + std::max(quiet.peak / kSlackShare, relocation_min());
  if (alarm > device.cap - device.cap / kSpareShare || device.excess || !device.settled || recorder_ ||
      evicts_after_operators_ || device.running != 0 || stays_awake_.load() || quiet.overlap > quiet.since) {
    return false;
  }
  std::size_t known = 0;
  for (const auto& [id, record] : records_) {
    if (record->device == index) {
      if (record->points_at == Side::kHost) {
        return false;
      }
      known += record->bytes;
    }
  }
  for (const auto& [id, record] : records_) {
    if (record->device == index && record->host_block != nullptr) {
      drop_host_copy(*record); // writes to the device copy will not be seen
    }
  }
  device.pending.clear();
  device.unforeseen.clear();
  device.retired.clear();
  const std::size_t allocated = allocated_bytes(index);
  quiet.other = allocated - std::min(allocated, known);
  quiet.alarm = alarm;
  device.asleep = true;
  device.settled = false;
  note_awake();
  return true;
}

std::size_t Engine::allocated_bytes(int device) const {
  return static_cast<std::size_t>(memory_.levels(Location::device(device)).allocated_bytes[0]);
}

void Engine::note_allocation(int device) {
  if (!has_sleepers()) {
    return;
  }
  {
    const Lock lock(*this);
    if (!of(device).asleep || of(device).quiet.alarm == 0 || allocated_bytes(device) <= of(device).quiet.alarm) {
      return;
    }
  }
  wake(device);
}

void Engine::wake(int device) {
  {
    const Lock lock(*this);
    if (!of(device).asleep) {
      return;
    }
    of(device).asleep = false;
    of(device).settled = false; // of a soft budget, too, that has slept from the first
    note_awake();
  }
  door_.wake();
}

void Engine::wake_resting() {
  for (int device = 0; has_sleepers() && device < static_cast<int>(devices_.size()); ++device) {
    bool rests = false;
    {
      const Lock lock(*this);
      rests = of(device).asleep && of(device).quiet.alarm != 0;
    }
    if (rests) {
      wake(device);
    }
  }
}

bool Engine::may_run_unseen(const Device& device) const {
  const std::optional<int> running = door_.running_kernels();
  return (running ? *running != 0 : device.quiet.seen < kSettled) || unseen_graphs_.load() != 0 || has_open_captures();
}

void Engine::settle_down(int index, bool surely_outermost) {
  Device& device = of(index);
  device.quiet.seen += surely_outermost ? kSurely : 1;
  if (!may_run_unseen(device)) {
    note_settled(index);
  }
}

void Engine::note_settled(int index) {
  Device& device = of(index);
  runtime_.synchronize_device(index); // what was queued on streams that nobody knows
  device.settled = true;
  const unsigned rests = device.quiet.rests + (device.quiet.alarm != 0 ? 1 : 0);
  std::size_t known = 0;
  for (const auto& [id, record] : records_) {
    known += record->device == index && record->device_block != nullptr ? record->bytes : 0;
  }
  const std::size_t allocated = allocated_bytes(index);
  const std::size_t other = device.quiet.other;
  device.quiet = Quiet{};
  device.quiet.rests = rests;
  device.quiet.other = other;
  device.quiet.unseen = allocated - std::min(allocated, known + other);
  device.excess = true; // maybe: that is looked at when this operator ends
  note_awake();
  restart_quiet(device);
}

} // namespace torch_uvm
