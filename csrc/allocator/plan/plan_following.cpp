// Serving an iteration by plan, and handling deviations from it.
#include <algorithm>
#include <utility>

#include "allocator/plan/plan_state.h"

namespace torch_uvm {
namespace {

/// Search distance, ahead and behind, after a mismatch.
constexpr std::uint32_t kNear = 64;
/// After this many fitting iterations in a row, a miss is treated as a change of the program, not as an alternation.
constexpr int kQuiescentAfter = 8;
/// Maximum number of iterations to wait before making another plan.
constexpr int kLongestWait = 63;

} // namespace

Allocation AllocationPlan::State::from_plan(std::size_t bytes, Stream stream, Lock& lock) {
  for (bool asked = false; has_plan(); asked = true) {
    if (following && !is_next(bytes, stream)) {
      deviate();
    }
    Slot* const slot = following ? &schedule->slots[cursor] : find_near(bytes, stream);
    if (slot == nullptr || slot->apart) {
      return {};
    }
    plan::Region& region = schedule->regions[slot->region];
    if (region.base == nullptr && !asked && !region.taking && region.refused != iteration) {
      take_segment(*schedule, region, lock);
      continue;
    }
    if (following) {
      if (can_serve(*slot)) {
        return serve(*slot);
      }
      deviate();
    }
    if (region.base != nullptr && !is_in_use(*slot)) {
      return serve_with_care(*slot);
    }
    pass(*slot);
    return {};
  }
  return {};
}

Allocation AllocationPlan::State::serve_with_care(Slot& slot) {
  plan::Entry entry = schedule->entry(slot);
  entry.begin = tick;
  entry.end = kNoEnd;
  record.push_back(entry);
  try {
    in_use.emplace(schedule->place(slot), &slot);
  } catch (...) {
    record.pop_back();
    throw;
  }
  ++tick;
  pass(slot);
  return allocate_from(slot, static_cast<std::uint32_t>(record.size() - 1));
}

void AllocationPlan::State::deviate() {
  std::vector<plan::Entry> so_far = record_of_slots();
  std::map<std::size_t, const Slot*> occupied;
  for (const Slot& slot : schedule->slots) {
    if (slot.state != Slot::State::kFree) {
      occupied.emplace(schedule->place(slot), &slot);
    }
  }
  record = std::move(so_far);
  in_use = std::move(occupied);
  for (std::uint32_t i = 0; i < cursor; ++i) {
    schedule->slots[i].claimed = iteration;
  }
  following = false;
}

std::vector<plan::Entry> AllocationPlan::State::record_of_slots() const {
  std::vector<plan::Entry> entries;
  entries.reserve(schedule->slots.size());
  for (std::uint32_t i = 0; i < cursor; ++i) {
    entries.push_back(schedule->entry(schedule->slots[i]));
  }
  return entries;
}

plan::Slot* AllocationPlan::State::find_near(std::size_t bytes, Stream stream) {
  std::vector<Slot>& slots = schedule->slots;
  const auto fits = [&](const Slot& slot) {
    return slot.claimed != iteration && schedule->matches(slot, bytes, stream);
  };
  const auto size = static_cast<std::uint32_t>(slots.size());
  for (std::uint32_t i = cursor; i < std::min(size, cursor + kNear); ++i) {
    if (fits(slots[i])) {
      return &slots[i];
    }
  }
  for (std::uint32_t i = cursor; i > cursor - std::min(cursor, kNear); --i) {
    if (fits(slots[i - 1])) {
      return &slots[i - 1];
    }
  }
  return nullptr;
}

bool AllocationPlan::State::is_in_use(const Slot& slot) const {
  const std::size_t place = schedule->place(slot);
  const auto above = in_use.lower_bound(place + slot.bytes);
  return above != in_use.begin() && std::prev(above)->first + std::prev(above)->second->bytes > place;
}

void AllocationPlan::State::note(plan::Apart& apart, std::size_t bytes) {
  if (phase != Phase::kIteration) {
    return;
  }
  if (following) {
    if (is_next(bytes, apart.stream) && schedule->slots[cursor].apart) {
      Slot& slot = schedule->slots[cursor];
      slot.begin = tick++;
      slot.end = kNoEnd;
      apart.iteration = iteration;
      apart.entry = cursor++;
      ++hits;
      return;
    }
    deviate();
  }
  Slot* const slot = schedule != nullptr ? find_near(bytes, apart.stream) : nullptr;
  const bool as_planned = slot != nullptr && slot->apart;
  record.push_back({.bytes = bytes,
                    .stream = apart.stream,
                    .begin = tick,
                    .end = kNoEnd,
                    .shared = apart.shared,
                    .outlived = as_planned && slot->outlived});
  ++tick;
  apart.iteration = iteration;
  apart.entry = static_cast<std::uint32_t>(record.size() - 1);
  if (as_planned) {
    pass(*slot);
    ++hits;
  } else if (schedule != nullptr) {
    ++misses;
  }
}

std::uint32_t* AllocationPlan::State::end_of(const plan::Tenant& tenant) {
  if (phase != Phase::kIteration || tenant.iteration != iteration) {
    return nullptr;
  }
  return following ? &schedule->slots[tenant.entry].end : &record[tenant.entry].end;
}

void AllocationPlan::State::mark_shared(plan::Tenant& tenant) {
  tenant.shared = true;
  if (tenant.in_slot) {
    static_cast<Slot&>(tenant).schedule->tainted = true;
  }
  if (phase == Phase::kIteration && tenant.iteration == iteration) {
    (following ? schedule->slots[tenant.entry].shared : record[tenant.entry].shared) = true;
  }
}

std::int64_t AllocationPlan::State::mark_outlived() {
  std::int64_t count = 0;
  if (schedule == nullptr || schedule->live == 0) {
    return count;
  }
  for (Slot& slot : schedule->slots) {
    if (slot.state == Slot::State::kLive && slot.iteration == iteration) {
      (following ? slot.outlived : record[slot.entry].outlived) = true;
      ++count;
    }
  }
  return count;
}

bool AllocationPlan::State::is_due(std::int64_t outlived_now) {
  if (schedule == nullptr) {
    return !record.empty();
  }
  if (schedule->tainted) {
    return true;
  }
  if (was_refused) {
    return false;
  }
  if (misses == 0 && outlived_now == 0) {
    ++fitting;
    // Requests excluded from the plan because they were not freed, but that were freed this time, can now be planned.
    const bool could_be_better = following && !schedule->was_followed && cursor == schedule->slots.size() &&
                                 std::ranges::any_of(schedule->slots, [](const Slot& slot) {
                                   return slot.apart && !slot.shared && !slot.outlived && slot.end != kNoEnd;
                                 });
    schedule->was_followed = schedule->was_followed || following;
    return could_be_better;
  }
  if (std::exchange(fitting, 0) >= kQuiescentAfter) {
    futile = waiting = 0;
  }
  if (waiting > 0) {
    --waiting;
    return false;
  }
  ++futile;
  waiting = futile < 3 ? 0 : std::min(kLongestWait, (1 << std::min(futile - 2, 10)) - 1);
  return true;
}

} // namespace torch_uvm
