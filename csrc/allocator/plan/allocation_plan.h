// An allocation plan: records the allocations and frees of an iteration once, lays them out, and serves later
// iterations by index.
//
// - A plan serves allocations between begin_iteration and end_iteration. While there is no plan, the upstream serves
//   all requests, and their sizes, streams and order are recorded.
// - The layout (plan_layout.h) lies in one upstream segment per stream, so that the upstream can free each segment in
//   the order of one stream and no stream waits for another. A segment is allocated at the first request in it and kept
//   until `release` or a new plan.
// - In an iteration that follows the plan, request i gets slot i: no search, no call of the upstream or the runtime, no
//   event. The slot is checked against its few predecessors, the previous owners of its bytes, so frees may come in any
//   order.
// - A request whose size or stream differs, or whose slot is still in use, is a miss: the upstream serves it. For the
//   rest of the iteration, matching requests are searched some positions ahead and behind, and their memory is checked
//   against all live slots. Recording is free while the plan is followed, because each slot stores its own begin and
//   end. After the first mismatch a record is kept as in the first iteration, and a new plan is made from it at the
//   end. If replanning keeps failing, it is retried ever more rarely, down to every 64th iteration.
// - An allocation that outlives the iteration or is used by other streams (record_stream) is not part of the layout:
//   the upstream serves it each time. The segment is therefore idle between iterations. If a planned allocation
//   unexpectedly outlives the iteration, it is counted, its segment stays until it is freed, its memory is not reused,
//   and the next plan excludes it.
// - A planned allocation that another stream uses is not reused until its segment has been freed to the upstream, which
//   is told of that stream. The plan could wait with an event of its own, but a program that does this once does it in
//   every iteration, and the upstream avoids making a stream wait.
// - An iteration that ends before the plan does is not a miss. Programs with several patterns (training and evaluation)
//   should use one plan per pattern; a shared plan would be remade at every switch.
// - Requests for another home or outside an iteration are forwarded to the upstream.
//
// A stream must outlive the segments allocated for it. Before destroying a stream, call release or destroy the plan.
//
// Thread-safe. Threads of an iteration may interleave; if their order changes, requests may miss, as above. Only one
// thread at a time may call begin_iteration and end_iteration.
//
// Lock order: the plan's lock is a leaf. Nothing is called with it held, in particular not the upstream. The layout is
// computed without it. In a forked child a plan serves nothing and takes no lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/plan/plan_schedule.h"
#include "runtime/forks.h"

namespace torch_uvm {

/// Description of a plan, and how well it fits.
struct PlanReport {
  std::int64_t iterations = 0; ///< completed
  std::int64_t plans = 0; ///< number of plans made
  std::int64_t hits = 0; ///< requests served by plan
  std::int64_t misses = 0; ///< requests not served by plan, in iterations that had a plan
  std::int64_t outlived = 0; ///< planned allocations that were not freed in their iteration
  // Of the plan that the next iteration will follow; all 0 if there is none.
  std::size_t requests = 0;
  std::size_t planned_requests = 0; ///< of these, the requests in the layout
  std::size_t planned_bytes = 0; ///< size of the layout, all streams together
  std::size_t peak_live_bytes = 0; ///< peak of the bytes of planned requests; a lower bound for any layout
  std::vector<PlannedRequest> layout; ///< every request, in order
};

class AllocationPlan final : public Allocator {
 public:
  /// \param home of the planned requests \throws InvalidArgument if upstream is null
  AllocationPlan(std::shared_ptr<Allocator> upstream, Location home);
  ~AllocationPlan() override; ///< frees its segments; leaks those with an allocation still in use

  /// \throws InvalidArgument if an iteration is in progress; RuntimeFailure in a forked child
  void begin_iteration();
  /// Makes a plan if there is none or it did not fit. plan_layout.h describes the cost.
  /// \throws InvalidArgument if no iteration is in progress; RuntimeFailure in a forked child
  void end_iteration();

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  /// Frees the segments, unless an allocation lives in one. The next planned request allocates its segment again.
  std::size_t release() override;
  bool serves(Location home) const override;
  AllocatorFigures figures() const override;
  std::string description() const override;

  PlanReport report() const;

 private:
  struct State;

  void check_not_forked() const; ///< \throws RuntimeFailure in a forked child

  const ForkWatch forks_;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
