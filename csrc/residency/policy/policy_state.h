// A policy's private state, shared by policy*.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "residency/policy/flat_map.h"
#include "residency/policy/follower.h"
#include "residency/policy/lap.h"
#include "residency/policy/operator_log.h"
#include "residency/policy/plan.h"
#include "residency/policy/policy.h"

namespace torch_uvm {

struct Policy::State {
  static constexpr std::size_t kMarkedSteps = 16; ///< number of marked steps to remember
  static constexpr std::size_t kMaxResults = 4096; ///< entries of `results`

  PolicyOptions options;
  std::uint64_t options_version = 1;
  FlatMap<planning::StorageState> storages;
  planning::OperatorLog log;
  planning::Follower follower;
  Counters counters;
  Decision decision;
  std::vector<planning::Operand> operands; ///< of the latest operator
  std::vector<planning::SeenOperand> seen;
  std::size_t born = 0; ///< number of storages created since it began
  bool in_place_ok = false;
  bool catch_up = false; ///< the position has jumped: issue the fetches that are already due
  bool forget = false;
  std::uint64_t next_planning = 0; ///< the earliest operator at which to make another schedule
  std::uint64_t last_mark = 0; ///< the operator at the latest step mark
  std::uint64_t mark_before = 0; ///< the operator at the step mark before that
  std::array<std::uint64_t, kMarkedSteps> marked{}; ///< hashes of the latest marked steps
  std::size_t next_marked = 0;
  /// Result sizes of operators that matched no schedule, by hash of operator and operand sizes.
  std::unordered_map<std::uint64_t, std::vector<std::size_t>> results;
  std::uint64_t kind = 0; ///< the latest operator's key in `results`
  std::unordered_set<OperatorKey> names;
  std::size_t largest_result = 0;

  /// Starts tracking a storage. \param found it existed before and is seen only now
  planning::StorageState& born_now(StorageId storage, std::size_t bytes, bool found) {
    planning::StorageState& state = storages[storage];
    state = planning::StorageState{};
    state.found = found;
    state.bytes = bytes;
    state.birth = log.latest();
    log.birth({storage, bytes});
    follower.born(storage, state, born++);
    return state;
  }

  /// The storage's next use in the current schedule; nullopt if none is known.
  std::optional<planning::NextUse> next_use(StorageId storage) const;
  /// Collects the operands of the operator that begins, each storage once.
  void see(std::span<const Access> accesses);
  /// Predicts the operator's results from an earlier operator of the same name and operand sizes.
  void expect_results(OperatorKey key);
  /// Makes a schedule if the latest operators repeat those before them and it is time for one.
  void consider_planning();
  bool repeats(std::uint64_t operators);
  /// Makes a schedule from the last `operators`. \param repeated see make_lap
  void plan_last(std::uint64_t operators, bool repeated);
  void end_marked_step();
  /// (Re)computes a schedule for the current options and pins.
  void solve(planning::KnownPlan& known);
  /// Fills `decision` from the current schedule and position.
  void advise();
  void retire(std::uint32_t part);
  void fetch(std::uint32_t part);
  void install(planning::KnownPlan& known);
  void ask_for_what_is_due(const planning::KnownPlan& known);
};

} // namespace torch_uvm
