// The schedule: the evictions and prefetches of one iteration of a step, computed for the steady state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
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

/// What a schedule decides.
struct Decisions {
  std::vector<bool> evicted_after; ///< by use: the value is evicted after it
  std::vector<bool> in_place; ///< by use: on the host
  Lists retire; ///< by operator: values to evict after it
  Lists write_back; ///< by operator: values to write back after it, whose evictions come later
  Lists fetch; ///< by operator: values to prefetch after it, in order of need
  std::vector<Fetch> fetches; ///< all prefetches, in order of need
  double predicted_ms = 0; ///< duration of an iteration (predict_ms); 0: the operators' durations are not known
};

struct Schedule : Decisions {
  Iteration iteration;
};

/// Decides after which uses a value is evicted (`evicted_after`) and which uses happen on the host (`in_place`). Evicts
/// the value with the farthest next use (Belady), and simulates several iterations to reach the steady state.
void choose_evictions(Schedule& schedule, const PolicyOptions& options, std::size_t capacity);

/// How `choose_evictions_in_time` ranks the gaps between two uses.
enum class GapRule {
  kMostExcess, ///< by the bytes above the capacity during the gap, times their duration, per transferred byte
  kFewest, ///< by bytes, for few transfers; what needs none, since operators may use it on the host, as if it was large
  kStay, ///< what needs no transfer, then by bytes
};

/// The same from the operators' durations. An eviction hides both transfers in the gap to the value's next use if the
/// link has the time for them there, beside those of the evictions before it. Operators are relieved in order of their
/// bytes above the capacity, each by the gap that `rule` ranks first among those that hide their transfers. If there is
/// none, transfers are exposed, and then uses are in place.
void choose_evictions_in_time(Schedule& schedule, const PolicyOptions& options, std::size_t capacity, GapRule rule);

/// Device bytes in use during each operator, without prefetches.
std::vector<std::size_t> base_usage(const Schedule& schedule);

/// Issues each prefetch as early as there is room from then until its use, in order of need. Once all have their room,
/// a value that also has it all the way back to its eviction is not evicted.
/// \param ahead by use that a prefetch follows: the maximum number of operators between the prefetch and its use;
///   empty: no maximum
void place_fetches(Schedule& schedule, std::size_t capacity, std::span<const std::uint32_t> ahead = {});

/// Writes values back right after their last writes, so that nothing has to be copied when they are evicted. Without
/// this an eviction writes back.
void write_back_early(Schedule& schedule);

/// For `place_fetches`: how far ahead each prefetch must be issued to be done before its use, if it is issued as late
/// as possible and each waits for the ones before it.
std::vector<std::uint32_t> latest_fetches(const Schedule& schedule, const LinkRates& rates);

/// How long an iteration takes that follows the schedule. Simulates operators and both directions of the link until the
/// steady state. Operators run one after the other, and each direction carries one transfer at a time; together they
/// reach `LinkRates::both`. A fetch begins once it is issued and there is room for it. An operator begins once its
/// operands are resident and there is room for its results. Copies beside an operator slow it. A use in place takes at
/// least as long as the bytes need to cross the link. The host starts the transfers and queues the operators one after
/// the other, and the program waits for the device once an iteration. Memory has no fragments.
/// \return milliseconds; infinity if an operator or a fetch finds no room
double predict_ms(const Schedule& schedule, const LinkRates& rates, std::size_t capacity);

/// Bytes of the budget for storages that are not pinned.
std::size_t capacity_of(const Iteration& iteration, const PolicyOptions& options);

/// The schedule from the order of operators alone.
Schedule make_schedule(Iteration iteration, const PolicyOptions& options);

/// Makes decisions by several rules, from the order of operators and from their durations, and keeps those with the
/// shortest prediction.
/// \param schedule its iteration has the operators' durations; its decisions are overwritten
void choose_fastest(Schedule& schedule, const PolicyOptions& options);

} // namespace torch_uvm::scheduling
