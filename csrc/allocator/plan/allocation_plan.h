// An allocation plan: records the allocations and frees of an iteration, lays them out, and serves later iterations by
// index.
//
// - A plan serves allocations between begin_iteration and end_iteration. While there is no plan, the upstream serves
//   all requests, and their sizes, streams and order are recorded.
// - The layout (plan_layout.h) lies in one upstream segment, for the requests of the first request's stream. The
//   segment is allocated when an iteration begins and kept until `release` or a new plan.
// - Request i of a later iteration gets slot i: no search, no call of the upstream or the runtime, no event. If its
//   size or stream differs, the next few slots are compared, and those before the match stay unserved. Allocations that
//   live past their planned end are known, and a slot whose bytes they have is not served, so frees may come in any
//   order.
// - Any other request is a miss: the upstream serves it. After an iteration with misses a new plan is made.
// - An allocation that outlives the iteration or is used by other streams (record_stream) is not part of the layout:
//   the upstream serves it each time. If a planned one does so unexpectedly, the next plan excludes it, and its segment
//   goes back to the upstream with its last allocation; the upstream knows of the other streams.
// - Programs with several patterns (training and evaluation) should use one plan per pattern.
// - Requests for another home or outside an iteration are forwarded to the upstream.
//
// Thread-safe. Threads of an iteration may interleave; if their order changes, requests miss. Only one thread at a time
// may call begin_iteration and end_iteration. The mutex is a leaf: the upstream is not called with it held, and layouts
// are computed without it. In a forked child a plan serves nothing and takes no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/plan/plan_layout.h"
#include "runtime/forks.h"

namespace torch_uvm {

/// Description of a plan, and how well it fits.
struct PlanReport {
  std::int64_t iterations = 0; ///< completed
  std::int64_t plans = 0; ///< number of plans made
  std::int64_t hits = 0; ///< requests that were as planned
  std::int64_t misses = 0; ///< other requests, in iterations that had a plan
  std::int64_t outlived = 0; ///< planned allocations that were not freed in their iteration
  // Of the plan that the next iteration will follow; all 0 if there is none.
  std::size_t requests = 0;
  std::size_t planned_bytes = 0; ///< size of the layout
  std::vector<std::pair<std::size_t, PlanRequest>> layout; ///< offsets and planned requests, in order
};

class AllocationPlan final : public Allocator {
 public:
  /// \param home of the planned requests \throws InvalidArgument if upstream is null
  AllocationPlan(std::shared_ptr<Allocator> upstream, Location home);
  ~AllocationPlan() override;

  /// \throws InvalidArgument if an iteration is in progress; RuntimeFailure in a forked child
  void begin_iteration();
  /// Makes a plan if there is none or it did not fit. plan_layout.h describes the cost.
  /// \throws InvalidArgument if no iteration is in progress; RuntimeFailure in a forked child
  void end_iteration();

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  /// Frees the segment, unless an allocation lives in it. The next iteration allocates it again.
  std::size_t release() override;
  bool serves(Location home) const override {
    return upstream_->serves(home);
  }
  AllocatorFigures figures() const override;
  std::string description() const override {
    return "plan(" + upstream_->description() + ")";
  }

  PlanReport report() const;

 private:
  struct Slot;
  struct Schedule;
  /// State of the current iteration.
  struct Iteration {
    std::size_t cursor = 0; ///< slot of the next request
    std::size_t ended = 0; ///< planned slots, by their end, whose end has come
    std::vector<const Slot*> late; ///< of these, those that were live
    std::uint32_t tick = 0; ///< number of events
    std::vector<Slot> record; ///< the requests
    std::int64_t misses = 0;
  };

  // Require the mutex:
  Slot* next_slot(std::size_t bytes, Stream stream);
  bool is_free(const Slot& slot);
  bool is_due() const;

  const std::shared_ptr<Allocator> upstream_;
  const Location home_;
  const ForkWatch forks_;

  mutable std::mutex mutex_; // guards the rest
  std::shared_ptr<Schedule> schedule_; ///< null: no plan yet
  bool in_iteration_ = false;
  std::uint32_t iteration_ = 0; ///< starts at 1
  Iteration now_;
  PlanReport counts_; ///< the part that does not describe the schedule
  AllocatorFigures figures_;
};

} // namespace torch_uvm
