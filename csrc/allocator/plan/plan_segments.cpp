// Segments of a plan: allocation, release, and schedules that stay while allocations live in them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "allocator/plan/plan_state.h"

namespace torch_uvm {

void AllocationPlan::State::count_taken(std::size_t bytes) {
  ++figures.upstream_allocations;
  figures.reserved_bytes += static_cast<std::int64_t>(bytes);
  figures.peak_reserved_bytes = std::max(figures.peak_reserved_bytes, figures.reserved_bytes);
}

void AllocationPlan::State::count_released(std::size_t bytes) {
  ++figures.upstream_frees;
  figures.reserved_bytes -= static_cast<std::int64_t>(bytes);
}

void AllocationPlan::State::take_segment(Schedule& of, plan::Region& region, Lock& lock) {
  region.taking = true;
  ++of.live; // keeps the schedule alive
  lock.unlock();
  Allocation segment;
  try {
    segment = upstream->allocate(region.bytes, home, region.stream);
  } catch (const std::exception&) {
    // The upstream may still have memory for the individual requests. If not, those requests raise.
  }
  lock.lock();
  --of.live;
  region.taking = false;
  if (segment) {
    region.segment = segment;
    region.base = static_cast<char*>(segment.ptr);
    count_taken(region.bytes);
  } else {
    region.refused = iteration;
    was_refused = true;
  }
  reap(of, lock);
}

std::size_t AllocationPlan::State::release_segments(Schedule& of, Lock& lock) noexcept {
  std::size_t bytes = 0;
  ++of.live; // keeps the schedule alive
  for (plan::Region& region : of.regions) {
    if (of.live > 1) {
      break; // another thread has allocated a slot meanwhile
    }
    if (region.base != nullptr) {
      const Allocation segment = std::exchange(region.segment, {});
      region.base = nullptr;
      count_released(region.bytes);
      bytes += region.bytes;
      lock.unlock();
      upstream->free(segment);
      lock.lock();
    }
  }
  --of.live;
  return bytes;
}

void AllocationPlan::State::retire(std::unique_ptr<Schedule> old, Lock& lock) noexcept {
  Schedule& going = *old;
  old->next = std::move(retired);
  retired = std::move(old);
  reap(going, lock);
}

void AllocationPlan::State::reap(Schedule& old, Lock& lock) noexcept {
  if (&old == schedule.get() || old.live > 0) {
    return;
  }
  std::unique_ptr<Schedule>* link = &retired;
  while (link->get() != &old) {
    link = &(*link)->next;
  }
  std::unique_ptr<Schedule> gone = std::move(*link);
  *link = std::move(gone->next);
  release_segments(*gone, lock);
  lock.unlock();
  gone.reset();
  lock.lock();
}

void AllocationPlan::State::free_slot(Slot& slot, Lock& lock) noexcept {
  if (slot.state != Slot::State::kLive) {
    // Continuing would give the same bytes to two owners.
    std::fprintf(stderr, "torch_uvm: a planned allocation was freed that is not allocated (freed twice?)\n");
    std::abort();
  }
  if (std::uint32_t* const end = end_of(slot)) {
    *end = tick++;
  }
  slot.state = slot.shared ? Slot::State::kBlocked : Slot::State::kFree;
  --slot.schedule->live;
  count_freed(slot.bytes);
  if (slot.schedule != schedule.get()) {
    reap(*slot.schedule, lock);
  } else if (!following && slot.state == Slot::State::kFree) {
    in_use.erase(schedule->place(slot));
  }
}

} // namespace torch_uvm
