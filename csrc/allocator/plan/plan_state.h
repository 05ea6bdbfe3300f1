// What an allocation plan knows. Its functions are in allocation_plan.cpp, what follows a plan in plan_following.cpp,
// what comes and goes with it in plan_segments.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "allocator/adaptive_mutex.h"
#include "allocator/plan/allocation_plan.h"

namespace torch_uvm {

/// All functions are called with the lock held. Those that take it as an argument give it up in between, and much may
/// have changed when they return.
struct AllocationPlan::State {
  using Slot = plan::Slot;
  using Schedule = plan::Schedule;
  using Lock = std::unique_lock<AdaptiveMutex>;

  State(std::shared_ptr<Allocator> upstream, Location home) : upstream(std::move(upstream)), home(home) {}

  // --- following a plan -------------------------------------------------------------------------------------

  bool has_plan() const {
    return phase == Phase::kIteration && schedule != nullptr;
  }
  /// Whether the plan has this request next, in an iteration that has gone by plan so far.
  bool is_next(std::size_t bytes, Stream stream) const {
    return following && cursor < schedule->slots.size() && schedule->matches(schedule->slots[cursor], bytes, stream);
  }
  /// Whether a slot can be had, in an iteration that has gone by plan so far.
  bool can_serve(const Slot& slot) const {
    return !slot.apart && schedule->regions[slot.region].base != nullptr && schedule->is_clear(slot);
  }
  /// Gives the slot at the cursor to a caller, in an iteration that has gone by plan so far.
  Allocation serve(Slot& slot) {
    slot.begin = tick++;
    slot.end = kNoEnd;
    return hand_out(slot, cursor++);
  }
  /// Gives any slot to a caller, in an iteration that has not.
  Allocation serve_with_care(Slot& slot);
  Allocation hand_out(Slot& slot, std::uint32_t entry) {
    slot.state = Slot::State::kLive;
    slot.entry = entry;
    slot.iteration = iteration;
    ++schedule->live;
    ++hits;
    count_allocated(slot.bytes);
    return {schedule->regions[slot.region].base + slot.offset, slot.bytes, static_cast<plan::Tenant*>(&slot)};
  }
  /// The place that the plan has for a request; an empty allocation: none that can be had.
  Allocation from_plan(std::size_t bytes, Stream stream, Lock& lock);

  /// The iteration does not go by plan from here on.
  void deviate();
  std::vector<plan::Entry> record_of_slots() const;
  /// A request of that kind near the cursor that has not been made in this iteration; nullptr: none.
  Slot* find_near(std::size_t bytes, Stream stream);
  /// The next request is looked for behind this one.
  void pass(Slot& slot) {
    slot.claimed = iteration;
    cursor = static_cast<std::uint32_t>(&slot - schedule->slots.data()) + 1;
  }
  bool is_in_use(const Slot& slot) const;

  /// Writes down an allocation that the upstream has served.
  void note(plan::Apart& apart, std::size_t bytes);
  /// Where the end of an allocation is written; nullptr: it is not of the iteration under way.
  std::uint32_t* end_of(const plan::Tenant& tenant);
  void mark_shared(plan::Tenant& tenant);

  /// Planned allocations of this iteration that are in callers' hands at its end; the next plan has no place for them.
  std::int64_t mark_outlived();
  /// Whether the plan is to be made again, now that the iteration is over.
  bool is_due(std::int64_t outlived_now);

  // --- what comes and goes ----------------------------------------------------------------------------------

  void take_segment(Schedule& of, plan::Region& region, Lock& lock);
  /// Those of a schedule that nobody lives in. \return bytes
  std::size_t give_back_segments(Schedule& of, Lock& lock) noexcept;
  /// Nobody follows it any more: it goes once nobody lives in it.
  void retire(std::unique_ptr<Schedule> old, Lock& lock) noexcept;
  /// It goes now, if nobody follows it and nobody lives in it.
  void reap(Schedule& old, Lock& lock) noexcept;
  void free_slot(Slot& slot, Lock& lock) noexcept;

  void count_allocated(std::size_t bytes) {
    ++figures.allocations;
    figures.requested_bytes += static_cast<std::int64_t>(bytes);
    if (figures.requested_bytes > figures.peak_requested_bytes) {
      figures.peak_requested_bytes = figures.requested_bytes;
    }
  }
  void count_freed(std::size_t bytes) {
    --figures.allocations;
    figures.requested_bytes -= static_cast<std::int64_t>(bytes);
  }
  void count_taken(std::size_t bytes);
  void count_given_back(std::size_t bytes);

  const std::shared_ptr<Allocator> upstream;
  const Location home;
  mutable AdaptiveMutex mutex; ///< held over heap allocations, and over a walk of the plan

  enum class Phase { kIdle, kIteration, kPlanning } phase = Phase::kIdle;
  bool following = false; ///< the iteration has a plan, and has gone by it so far
  std::uint32_t iteration = 0; ///< from 1 on
  std::uint32_t cursor = 0; ///< the slot of the next request
  std::uint32_t tick = 0; ///< events of the iteration so far
  std::unique_ptr<Schedule> schedule; ///< nullptr: there is no plan yet
  std::unique_ptr<Schedule> retired; ///< a list

  // Of an iteration that has no plan, or does not go by it.
  std::vector<plan::Entry> record;
  std::map<std::size_t, const Slot*> in_use; ///< slots that nobody else may have bytes of, by place

  // Of this iteration.
  std::int64_t misses = 0;
  bool was_refused = false; ///< a segment could not be had: another plan would not help

  int fitting = 0; ///< iterations in a row that had a plan and no miss
  int futile = 0; ///< plans in a row that did not come to fit for long
  int waiting = 0; ///< iterations that may miss before the next one is made

  std::int64_t iterations = 0, plans = 0, hits = 0, all_misses = 0, outlived = 0;
  AllocatorFigures figures;
};

} // namespace torch_uvm
