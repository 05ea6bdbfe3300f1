// Internal state of an allocation plan. allocation_plan.cpp has the public functions, plan_following.cpp the execution
// of a plan, plan_segments.cpp its segments and schedules.
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

/// All functions require the lock. Those that take it as an argument release it temporarily, and the state may have
/// changed when they return.
struct AllocationPlan::State {
  using Slot = plan::Slot;
  using Schedule = plan::Schedule;
  using Lock = std::unique_lock<AdaptiveMutex>;

  State(std::shared_ptr<Allocator> upstream, Location home) : upstream(std::move(upstream)), home(home) {}

  // --- execution of a plan --------------------------------------------------------------------------------------

  bool has_plan() const {
    return phase == Phase::kIteration && schedule != nullptr;
  }
  /// Whether this request matches the next slot, in an iteration that has followed the plan so far.
  bool is_next(std::size_t bytes, Stream stream) const {
    return following && cursor < schedule->slots.size() && schedule->matches(schedule->slots[cursor], bytes, stream);
  }
  /// Whether a slot can be used, in an iteration that has followed the plan so far.
  bool can_serve(const Slot& slot) const {
    return !slot.apart && schedule->regions[slot.region].base != nullptr && schedule->is_clear(slot);
  }
  /// Allocates the slot at the cursor, in an iteration that has followed the plan so far.
  Allocation serve(Slot& slot) {
    slot.begin = tick++;
    slot.end = kNoEnd;
    return allocate_from(slot, cursor++);
  }
  /// Allocates any slot, in an iteration that has deviated from the plan.
  Allocation serve_with_care(Slot& slot);
  Allocation allocate_from(Slot& slot, std::uint32_t entry) {
    slot.state = Slot::State::kLive;
    slot.entry = entry;
    slot.iteration = iteration;
    ++schedule->live;
    ++hits;
    count_allocated(slot.bytes);
    return {schedule->regions[slot.region].base + slot.offset, slot.bytes, static_cast<plan::Tenant*>(&slot)};
  }
  /// Serves a request from the plan. Returns an empty allocation if there is no usable slot.
  Allocation from_plan(std::size_t bytes, Stream stream, Lock& lock);

  /// Called at the first mismatch of an iteration: it no longer follows the plan.
  void deviate();
  std::vector<plan::Entry> record_of_slots() const;
  /// A matching slot near the cursor that is unclaimed in this iteration, or nullptr.
  Slot* find_near(std::size_t bytes, Stream stream);
  /// Claims the slot and moves the cursor behind it.
  void pass(Slot& slot) {
    slot.claimed = iteration;
    cursor = static_cast<std::uint32_t>(&slot - schedule->slots.data()) + 1;
  }
  bool is_in_use(const Slot& slot) const;

  /// Records an allocation that the upstream has served.
  void note(plan::Apart& apart, std::size_t bytes);
  /// Where the free of an allocation is recorded; nullptr if it does not belong to the current iteration.
  std::uint32_t* end_of(const plan::Tenant& tenant);
  void mark_shared(plan::Tenant& tenant);

  /// Marks planned allocations of this iteration that are still live at its end. The next plan excludes them.
  std::int64_t mark_outlived();
  /// Whether a new plan should be made at the end of the iteration.
  bool is_due(std::int64_t outlived_now);

  // --- segments and schedules -----------------------------------------------------------------------------------

  void take_segment(Schedule& of, plan::Region& region, Lock& lock);
  /// Frees the segments of a schedule while nothing lives in it. \return bytes
  std::size_t release_segments(Schedule& of, Lock& lock) noexcept;
  /// Retires a schedule that is no longer followed. It is destroyed once nothing lives in it.
  void retire(std::unique_ptr<Schedule> old, Lock& lock) noexcept;
  /// Destroys a retired schedule if nothing lives in it.
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
  void count_released(std::size_t bytes);

  const std::shared_ptr<Allocator> upstream;
  const Location home;
  mutable AdaptiveMutex mutex; ///< held during heap allocations and walks of the plan

  enum class Phase { kIdle, kIteration, kPlanning } phase = Phase::kIdle;
  bool following = false; ///< the iteration has a plan and has matched it so far
  std::uint32_t iteration = 0; ///< starts at 1
  std::uint32_t cursor = 0; ///< slot of the next request
  std::uint32_t tick = 0; ///< number of events in the iteration so far
  std::unique_ptr<Schedule> schedule; ///< null: no plan yet
  std::unique_ptr<Schedule> retired; ///< linked list

  // Used in an iteration that has no plan or has deviated from it.
  std::vector<plan::Entry> record;
  std::map<std::size_t, const Slot*> in_use; ///< slots whose memory must not be reused, by offset

  // Of the current iteration.
  std::int64_t misses = 0;
  bool was_refused = false; ///< a segment was refused; a new plan would not help

  int fitting = 0; ///< consecutive iterations with a plan and no miss
  int futile = 0; ///< consecutive plans that did not fit for long
  int waiting = 0; ///< iterations that may miss before the next plan is made

  std::int64_t iterations = 0, plans = 0, hits = 0, all_misses = 0, outlived = 0;
  AllocatorFigures figures;
};

} // namespace torch_uvm
