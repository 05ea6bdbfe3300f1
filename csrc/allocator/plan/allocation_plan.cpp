#include "allocator/plan/allocation_plan.h"

#include <algorithm>
#include <exception>
#include <iterator>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Slots that are compared with a request.
constexpr std::size_t kNear = 32;
/// Maximum number of requests in a layout; later ones stay with the upstream.
constexpr std::size_t kMostPlanned = 16384;

} // namespace

/// A request of an iteration, and the handle of its allocation.
struct AllocationPlan::Slot {
  PlanRequest request;
  bool apart = false; ///< never part of a layout: the upstream serves it
  std::uint32_t iteration = 0; ///< in which it was allocated last; 0: not recorded
  std::size_t entry = 0; ///< its index in the record of that iteration
  Allocation memory; ///< if it is from the upstream
  // If it is from a segment:
  Schedule* schedule = nullptr;
  std::size_t offset = 0;
  bool live = false;
};

struct AllocationPlan::Schedule {
  Schedule(AllocationPlan& plan, std::vector<Slot> record);
  ~Schedule(); ///< frees the segment; without the mutex
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

  AllocationPlan& plan;
  Stream stream; ///< of the layout
  std::vector<Slot> slots;
  std::vector<const Slot*> by_end; ///< the planned slots
  std::size_t bytes = 0;
  Allocation segment;
  std::int64_t live = 0; ///< allocations in the segment
  std::shared_ptr<Schedule> self; ///< while there are some, which may outlive the plan's use of it
  bool shared = false; ///< other streams used the segment: it must not be reused
};

AllocationPlan::Schedule::Schedule(AllocationPlan& plan, std::vector<Slot> record)
    : plan(plan), stream(record.front().request.stream), slots(std::move(record)) {
  std::vector<Slot*> planned;
  for (Slot& slot : slots) {
    slot.apart =
        slot.apart || slot.request.end == kNoEnd || slot.request.stream != stream || planned.size() == kMostPlanned;
    if (!slot.apart) {
      planned.push_back(&slot);
    }
  }
  std::vector<PlanRequest> requests;
  std::ranges::transform(planned, std::back_inserter(requests), [](const Slot* slot) { return slot->request; });
  const PlanLayout layout = lay_out(requests);
  bytes = layout.bytes;
  for (std::size_t i = 0; i < planned.size(); ++i) {
    planned[i]->schedule = this;
    planned[i]->offset = layout.offsets[i];
  }
  by_end.assign(planned.begin(), planned.end());
  std::ranges::sort(by_end, {}, [](const Slot* slot) { return slot->request.end; });
}

AllocationPlan::Schedule::~Schedule() {
  if (segment && !plan.forks_.in_child()) { // a child's memory belongs to the parent
    plan.upstream_->free(segment);
    const std::lock_guard lock(plan.mutex_);
    plan.figures_.count_released(segment.bytes);
  }
}

AllocationPlan::AllocationPlan(std::shared_ptr<Allocator> upstream, Location home)
    : upstream_(required(std::move(upstream), "an allocation plan")), home_(home) {}

AllocationPlan::~AllocationPlan() {
  schedule_.reset(); // while the members that ~Schedule uses still exist
}

// --- iterations -----------------------------------------------------------------------------------------------

void AllocationPlan::begin_iteration() {
  forks_.check_not_in_child();
  std::unique_lock lock(mutex_);
  if (in_iteration_) {
    throw InvalidArgument("an iteration of the plan begins while one is under way; they do not nest");
  }
  in_iteration_ = true;
  ++iteration_;
  now_ = {};
  if (schedule_ == nullptr || schedule_->bytes == 0 || schedule_->segment) {
    return;
  }
  const std::size_t bytes = schedule_->bytes;
  const Stream stream = schedule_->stream;
  lock.unlock();
  Allocation segment;
  try {
    segment = upstream_->allocate(bytes, home_, stream);
  } catch (const std::exception&) {
    // The upstream may still have memory for the individual requests. If not, those requests raise.
  }
  lock.lock();
  if (segment) {
    schedule_->segment = segment;
    figures_.count_reserved(bytes);
  }
}

void AllocationPlan::end_iteration() {
  forks_.check_not_in_child();
  std::shared_ptr<Schedule> old; // destroyed without the mutex
  std::vector<Slot> record;
  {
    const std::lock_guard lock(mutex_);
    if (!in_iteration_) {
      throw InvalidArgument("an iteration of the plan ends that has not begun");
    }
    in_iteration_ = false;
    ++counts_.iterations;
    counts_.misses += now_.misses;
    counts_.outlived += schedule_ == nullptr ? 0 : schedule_->live;
    if (!is_due()) {
      return;
    }
    record.swap(now_.record);
    old = std::move(schedule_);
  }
  old.reset();
  auto made = std::make_shared<Schedule>(*this, std::move(record));
  const std::lock_guard lock(mutex_);
  schedule_ = std::move(made);
  ++counts_.plans;
}

bool AllocationPlan::is_due() const {
  if (schedule_ == nullptr) {
    return !now_.record.empty();
  }
  // If the upstream refused its segment, every request misses, and a new plan would not help.
  const bool refused = schedule_->bytes > 0 && !schedule_->segment;
  return schedule_->live > 0 || schedule_->shared || (now_.misses > 0 && !refused);
}

// --- allocation -----------------------------------------------------------------------------------------------

AllocationPlan::Slot* AllocationPlan::next_slot(std::size_t bytes, Stream stream) {
  const std::size_t end = schedule_ == nullptr ? 0 : std::min(schedule_->slots.size(), now_.cursor + kNear);
  for (std::size_t i = now_.cursor; i < end; ++i) {
    Slot& slot = schedule_->slots[i];
    if (slot.request.bytes == bytes && slot.request.stream == stream) {
      now_.cursor = i + 1;
      return &slot;
    }
  }
  return nullptr;
}

/// Whether no live allocation has bytes of the slot, which comes next. Slots that overlap in bytes do not overlap in
/// time as planned, so it can only be one that lives past its planned end.
bool AllocationPlan::is_free(const Slot& slot) {
  std::erase_if(now_.late, [](const Slot* each) { return !each->live; });
  const std::vector<const Slot*>& by_end = schedule_->by_end;
  for (; now_.ended < by_end.size() && by_end[now_.ended]->request.end <= slot.request.begin; ++now_.ended) {
    if (by_end[now_.ended]->live) {
      now_.late.push_back(by_end[now_.ended]);
    }
  }
  return std::ranges::none_of(now_.late, [&](const Slot* each) {
    return each->offset < slot.offset + slot.request.bytes && slot.offset < each->offset + each->request.bytes;
  });
}

Allocation AllocationPlan::allocate(std::size_t bytes, Location home, Stream stream) {
  forks_.check_not_in_child();
  std::uint32_t iteration = 0;
  std::size_t entry = 0;
  if (home == home_ && bytes > 0) {
    const std::lock_guard lock(mutex_);
    if (in_iteration_) {
      Slot* const slot = next_slot(bytes, stream);
      const bool apart = slot != nullptr && slot->apart;
      const bool served = slot != nullptr && !apart && schedule_->segment && is_free(*slot);
      iteration = iteration_;
      entry = now_.record.size();
      now_.record.push_back({{bytes, now_.tick++, kNoEnd, stream}, apart, 0, 0, {}});
      counts_.hits += served || apart ? 1 : 0;
      now_.misses += served || apart || schedule_ == nullptr ? 0 : 1;
      if (served) {
        slot->iteration = iteration;
        slot->entry = entry;
        slot->live = true;
        if (schedule_->live++ == 0) {
          schedule_->self = schedule_;
        }
        figures_.count_allocated(bytes);
        return {static_cast<char*>(schedule_->segment.ptr) + slot->offset, bytes, slot};
      }
    }
  }
  auto apart = std::make_unique<Slot>(Slot{{bytes, 0, kNoEnd, stream}, true, iteration, entry, {}});
  apart->memory = upstream_->allocate(bytes, home, stream);
  if (!apart->memory) {
    return {};
  }
  const std::lock_guard lock(mutex_);
  figures_.count_allocated(bytes);
  figures_.count_reserved(bytes);
  void* const ptr = apart->memory.ptr;
  return {ptr, bytes, apart.release()};
}

void AllocationPlan::free(const Allocation& allocation) noexcept {
  if (allocation.handle == nullptr || forks_.in_child()) {
    return;
  }
  auto* const slot = static_cast<Slot*>(allocation.handle);
  Schedule* const schedule = slot->schedule;
  std::shared_ptr<Schedule> last; // destroyed without the mutex
  {
    const std::lock_guard lock(mutex_);
    if (in_iteration_ && slot->iteration == iteration_) {
      now_.record[slot->entry].request.end = now_.tick++;
    }
    figures_.count_freed(allocation.bytes);
    if (schedule == nullptr) {
      figures_.count_released(allocation.bytes);
    } else {
      slot->live = schedule->shared; // else its bytes are free
      if (--schedule->live == 0) {
        last = std::move(schedule->self);
      }
    }
  }
  if (schedule == nullptr) {
    upstream_->free(slot->memory);
    delete slot;
  }
}

void AllocationPlan::record_stream(const Allocation& allocation, Stream stream) {
  if (allocation.handle == nullptr) {
    return;
  }
  forks_.check_not_in_child();
  const auto& slot = *static_cast<Slot*>(allocation.handle);
  if (stream == slot.request.stream) {
    return;
  }
  upstream_->record_stream(slot.schedule == nullptr ? slot.memory : slot.schedule->segment, stream);
  if (stream.is_host()) { // the host's work needs no record
    return;
  }
  const std::lock_guard lock(mutex_);
  if (slot.schedule != nullptr) {
    slot.schedule->shared = true;
  }
  if (in_iteration_ && slot.iteration == iteration_) {
    now_.record[slot.entry].apart = true;
  }
}

std::size_t AllocationPlan::release() {
  if (forks_.in_child()) {
    return 0;
  }
  Allocation segment;
  {
    const std::lock_guard lock(mutex_);
    if (schedule_ == nullptr || schedule_->live > 0) {
      return 0;
    }
    segment = std::exchange(schedule_->segment, {});
    if (segment) {
      figures_.count_released(segment.bytes);
    }
  }
  upstream_->free(segment);
  return segment.bytes;
}

// --- statistics -----------------------------------------------------------------------------------------------

AllocatorFigures AllocationPlan::figures() const {
  forks_.check_not_in_child();
  const std::lock_guard lock(mutex_);
  return figures_;
}

PlanReport AllocationPlan::report() const {
  forks_.check_not_in_child();
  const std::lock_guard lock(mutex_);
  PlanReport report = counts_;
  report.misses += in_iteration_ ? now_.misses : 0;
  if (schedule_ != nullptr) {
    report.requests = schedule_->slots.size();
    report.planned_bytes = schedule_->bytes;
    for (const Slot& slot : schedule_->slots) {
      if (!slot.apart) {
        report.layout.emplace_back(slot.offset, slot.request);
      }
    }
  }
  return report;
}

} // namespace torch_uvm
