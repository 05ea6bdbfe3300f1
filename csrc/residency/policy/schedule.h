// The schedule: the evictions and prefetches of one iteration of a step, computed for the steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "residency/policy/decision.h"
#include "residency/policy/iteration.h"

namespace torch_uvm::scheduling {

/// A prefetch: issued after operator `issue` has ended, needed by operator `need`.
struct Fetch {
  std::uint32_t value = 0;
  std::uint32_t issue = 0;
  std::uint32_t need = 0;
};

struct NextUse {
  std::uint32_t ahead = 0; ///< number of operators from the latest one
  bool in_place = false;
};

struct Schedule {
  Iteration iteration;
  std::vector<bool> evicted_after; ///< by use: the value is evicted after it
  std::vector<bool> in_place; ///< by use: on the host
  Lists retire; ///< by operator: values to evict after it
  Lists fetch; ///< by operator: values to prefetch after it, in order of need
  std::vector<Fetch> fetches; ///< all prefetches, in order of need
};

/// Decides after which uses a value is evicted (`evicted_after`) and which uses happen on the host (`in_place`). Evicts
/// the value with the farthest next use (Belady), and simulates several iterations to reach the steady state.
void choose_evictions(Schedule& schedule, const PolicyOptions& options, std::size_t capacity);

/// Issues each prefetch as early as there is room from then until its use, in order of need. If there is room all the
/// way back to the eviction, the value is not evicted.
void place_fetches(Schedule& schedule, std::size_t capacity);

Schedule make_schedule(Iteration iteration, const PolicyOptions& options);

} // namespace torch_uvm::scheduling
