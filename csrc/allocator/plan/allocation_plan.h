// An allocation plan: what an iteration allocates and frees is recorded once, laid out, and from then on served by
// index.
//
// - A plan serves what is allocated between begin_iteration and end_iteration. Where there is no plan yet, requests go
//   to the upstream and are recorded: bytes, streams, the order in which they came and went.
// - The layout (plan_layout.h) lies in one segment of the upstream; of streams that share a plan each has one of its
//   own, so that the upstream knows whose order it goes back in, and nothing waits for another stream. A segment is
//   taken at the first request that lies in it, and kept until `release` or a new plan.
// - In an iteration that goes by plan, request i gets the place of request i: no search, no call of the upstream or the
//   runtime, no event. That nothing lives there any more is seen from the few requests that had its bytes last, so that
//   frees may come in another order than they were recorded in.
// - A request that differs in bytes or stream, or whose place is still in use, is a miss: the upstream serves it. The
//   rest of the iteration is served with care: the next request of that kind is looked for some places ahead and
//   behind, and its bytes are checked against all that live. Recording costs nothing while all goes by plan, since each
//   slot notes when it came and went; from the first difference on there is a record as in the first iteration, and
//   the plan is made again from it at the end. If that does not help, iteration after iteration, it is tried more and
//   more rarely, up to every 64th time.
// - What outlives the iteration, and what other streams use (record_stream), has a life of its own: it is no part of
// the
//   layout, the upstream serves it each time. So the segment is idle between iterations. An allocation that outlives
//   the iteration though the plan had foreseen its end is counted; its segment stays until it is freed, its bytes are
//   given to nobody, and it is left out of the next plan.
// - A planned allocation that another stream uses after all is not used again before its segment has gone back to the
//   upstream, which is told of that stream. Waiting for it by an event of the plan's own would be possible, but a
//   program that does so once does it each time, and then the upstream knows better than to make a stream wait.
// - An iteration that is over before the plan is is no miss. Programs with several patterns (training and evaluation)
//   give each a plan of its own: one plan that sees them in turn is made again and again.
// - Requests for another home, or outside an iteration, pass through to the upstream.
//
// Streams outlive the segments taken for them: before one is destroyed, release is called, or the plan is gone.
//
// Thread-safe. The threads of an iteration may take turns; where their order differs from the last time, requests may
// miss, as above. begin_iteration and end_iteration are one thread's at a time.
//
// Lock order: the plan's lock is a leaf. Nothing is called with it held, the upstream least of all; the layout is made
// without it. In a forked child a plan serves nothing, and takes no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/plan/plan_schedule.h"

namespace torch_uvm {

/// What a plan looks like, and how well it fits.
struct PlanReport {
  std::int64_t iterations = 0; ///< that are over
  std::int64_t plans = 0; ///< that were made
  std::int64_t hits = 0; ///< requests that went by plan
  std::int64_t misses = 0; ///< requests that did not, in iterations that had a plan
  std::int64_t outlived = 0; ///< planned allocations that were not freed in their iteration
  // Of the plan that the next iteration will follow; all 0 while there is none.
  std::size_t requests = 0;
  std::size_t planned_requests = 0; ///< of these, those that have a place in it
  std::size_t planned_bytes = 0; ///< of the layout, all streams together
  std::size_t peak_live_bytes = 0; ///< the most that planned requests ask for at once: no layout has less
  std::vector<PlannedRequest> layout; ///< every request, in order
};

class AllocationPlan final : public Allocator {
 public:
  /// \param home of the requests that are planned \throws InvalidArgument where there is no upstream
  AllocationPlan(std::shared_ptr<Allocator> upstream, Location home);
  ~AllocationPlan() override; ///< gives back its segments; those with an allocation in use, after all, are leaked

  /// \throws InvalidArgument where one is under way; RuntimeFailure in a forked child
  void begin_iteration();
  /// Makes the plan where there is none, or it did not fit; see plan_layout.h for what that costs.
  /// \throws InvalidArgument where none is under way; RuntimeFailure in a forked child
  void end_iteration();

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  /// Gives back the segments, if nothing lives in them; the next request that lies in one takes it again.
  std::size_t release() override;
  bool serves(Location home) const override;
  AllocatorFigures figures() const override;
  std::string description() const override;

  PlanReport report() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
