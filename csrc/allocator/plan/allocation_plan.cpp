// The public functions: iterations, and the fast path to a slot.
#include "allocator/plan/allocation_plan.h"

#include <utility>

#include "allocator/plan/plan_state.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

plan::Tenant& tenant_of(const Allocation& allocation) {
  return *static_cast<plan::Tenant*>(allocation.handle);
}

} // namespace

AllocationPlan::AllocationPlan(std::shared_ptr<Allocator> upstream, Location home)
    : state_(std::make_unique<State>(required(std::move(upstream), "an allocation plan"), home)) {}

void AllocationPlan::check_not_forked() const {
  if (forks_.in_child()) {
    throw RuntimeFailure(
        "managed memory is not available in a forked child process: it belongs to the parent. Start the process with "
        "the spawn method to use it there");
  }
}

AllocationPlan::~AllocationPlan() {
  if (forks_.in_child()) {
    static_cast<void>(state_.release()); // the memory belongs to the parent
    return;
  }
  State::Lock lock(state_->mutex);
  if (state_->schedule != nullptr) {
    state_->retire(std::move(state_->schedule), lock);
  }
  while (std::unique_ptr<plan::Schedule> used = std::move(state_->retired)) {
    state_->retired = std::move(used->next);
    static_cast<void>(used.release()); // leaked: the owners of its allocations still point to it
  }
}

void AllocationPlan::begin_iteration() {
  check_not_forked();
  State& state = *state_;
  State::Lock lock(state.mutex);
  if (state.phase != State::Phase::kIdle) {
    throw InvalidArgument("an iteration of the plan begins while one is under way; they do not nest");
  }
  state.record.clear();
  state.in_use.clear();
  std::unique_ptr<plan::Schedule> spoilt;
  if (state.schedule != nullptr && state.schedule->tainted) {
    spoilt = std::move(state.schedule);
  } else if (state.schedule != nullptr) {
    for (const plan::Slot& slot : state.schedule->slots) {
      if (state.schedule->live > 0 && slot.state != plan::Slot::State::kFree) {
        state.in_use.emplace(state.schedule->place(slot), &slot);
      }
    }
  }
  state.following = state.schedule != nullptr && state.schedule->live == 0;
  state.phase = State::Phase::kIteration;
  ++state.iteration;
  state.cursor = state.tick = 0;
  state.misses = 0;
  state.was_refused = false;
  if (spoilt != nullptr) {
    state.retire(std::move(spoilt), lock);
  }
}

void AllocationPlan::end_iteration() {
  check_not_forked();
  State& state = *state_;
  State::Lock lock(state.mutex);
  if (state.phase != State::Phase::kIteration) {
    throw InvalidArgument("an iteration of the plan ends that has not begun");
  }
  const std::int64_t outlived = state.mark_outlived();
  ++state.iterations;
  state.outlived += outlived;
  state.all_misses += state.misses;
  state.phase = State::Phase::kIdle;
  if (!state.is_due(outlived)) {
    state.following = false;
    return;
  }
  std::vector<plan::Entry> record =
      std::exchange(state.following, false) ? state.record_of_slots() : std::exchange(state.record, {});
  state.phase = State::Phase::kPlanning;
  lock.unlock();
  std::unique_ptr<plan::Schedule> made;
  try {
    made = std::make_unique<plan::Schedule>(record);
  } catch (...) {
    lock.lock();
    state.phase = State::Phase::kIdle;
    throw;
  }
  lock.lock();
  ++state.plans;
  std::swap(state.schedule, made);
  state.phase = State::Phase::kIdle;
  if (made != nullptr) {
    state.retire(std::move(made), lock);
  }
}

Allocation AllocationPlan::allocate(std::size_t bytes, Location home, Stream stream) {
  check_not_forked();
  State& state = *state_;
  const bool planned = home == state.home && bytes > 0;
  if (planned) {
    State::Lock lock(state.mutex);
    if (state.is_next(bytes, stream)) {
      if (plan::Slot& slot = state.schedule->slots[state.cursor]; state.can_serve(slot)) {
        return state.serve(slot);
      }
    }
    if (state.has_plan()) {
      if (const Allocation made = state.from_plan(bytes, stream, lock)) {
        return made;
      }
    }
  }
  auto apart = std::make_unique<plan::Apart>();
  apart->allocation = state.upstream->allocate(bytes, home, stream);
  if (!apart->allocation) {
    return {};
  }
  apart->stream = stream;
  try {
    const std::lock_guard lock(state.mutex);
    if (planned) {
      state.note(*apart, bytes);
    }
    state.count_allocated(bytes);
    state.count_taken(bytes);
  } catch (...) {
    state.upstream->free(apart->allocation);
    throw;
  }
  void* const ptr = apart->allocation.ptr;
  return {ptr, bytes, static_cast<plan::Tenant*>(apart.release())};
}

void AllocationPlan::free(const Allocation& allocation) noexcept {
  if (allocation.handle == nullptr) {
    return;
  }
  State& state = *state_;
  plan::Tenant& tenant = tenant_of(allocation);
  if (tenant.in_slot) {
    if (!forks_.in_child()) { // in a child, the memory belongs to the parent
      State::Lock lock(state.mutex);
      state.free_slot(static_cast<plan::Slot&>(tenant), lock);
    }
    return;
  }
  const std::unique_ptr<plan::Apart> apart(static_cast<plan::Apart*>(&tenant));
  if (!forks_.in_child()) {
    const std::lock_guard lock(state.mutex);
    if (std::uint32_t* const end = state.end_of(tenant)) {
      *end = state.tick++;
    }
    state.count_freed(allocation.bytes);
    state.count_released(allocation.bytes);
  }
  state.upstream->free(apart->allocation);
}

void AllocationPlan::record_stream(const Allocation& allocation, Stream stream) {
  if (allocation.handle == nullptr) {
    return;
  }
  check_not_forked();
  State& state = *state_;
  plan::Tenant& tenant = tenant_of(allocation);
  // A live allocation keeps its schedule and segment unchanged.
  const plan::Region* const region =
      tenant.in_slot ? &static_cast<plan::Slot&>(tenant).schedule->regions[static_cast<plan::Slot&>(tenant).region]
                     : nullptr;
  if (stream == (region != nullptr ? region->stream : static_cast<plan::Apart&>(tenant).stream)) {
    return;
  }
  state.upstream->record_stream(region != nullptr ? region->segment : static_cast<plan::Apart&>(tenant).allocation,
                                stream);
  if (!stream.is_host()) { // the host's work needs no record
    const std::lock_guard lock(state.mutex);
    state.mark_shared(tenant);
  }
}

std::size_t AllocationPlan::release() {
  if (forks_.in_child()) {
    return 0;
  }
  State::Lock lock(state_->mutex);
  if (state_->schedule == nullptr || state_->schedule->live > 0) {
    return 0;
  }
  plan::Schedule& schedule = *state_->schedule;
  const std::size_t bytes = state_->release_segments(schedule, lock);
  state_->reap(schedule, lock);
  return bytes;
}

bool AllocationPlan::serves(Location home) const {
  return state_->upstream->serves(home);
}

AllocatorFigures AllocationPlan::figures() const {
  check_not_forked();
  const std::lock_guard lock(state_->mutex);
  return state_->figures;
}

std::string AllocationPlan::description() const {
  return "plan(" + state_->upstream->description() + ")";
}

PlanReport AllocationPlan::report() const {
  check_not_forked();
  PlanReport report;
  std::shared_ptr<const std::vector<PlannedRequest>> picture;
  {
    const std::lock_guard lock(state_->mutex);
    report.iterations = state_->iterations;
    report.plans = state_->plans;
    report.hits = state_->hits;
    report.misses = state_->all_misses + (state_->phase == State::Phase::kIteration ? state_->misses : 0);
    report.outlived = state_->outlived;
    if (const plan::Schedule* const schedule = state_->schedule.get()) {
      report.requests = schedule->slots.size();
      report.planned_requests = schedule->in_plan;
      report.planned_bytes = schedule->bytes;
      report.peak_live_bytes = schedule->peak_live_bytes;
      picture = schedule->picture;
    }
  }
  if (picture != nullptr) {
    report.layout = *picture;
  }
  return report;
}

} // namespace torch_uvm
