// What a policy holds, shared by the files that make it up.
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
  static constexpr std::size_t kMarkedSteps = 16; ///< that are remembered
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
  std::size_t born = 0; ///< storages since it began
  bool in_place_ok = false;
  bool catch_up = false; ///< a plan was entered in its midst
  bool forget = false;
  std::uint64_t next_planning = 0; ///< not before this operator
  std::uint64_t last_mark = 0; ///< the last operator of the marked step before this one
  std::uint64_t mark_before = 0; ///< ... and of the one before that
  std::array<std::uint64_t, kMarkedSteps> marked{}; ///< hashes of the latest marked steps
  std::size_t next_marked = 0;
  /// Sizes of the results of operators that no plan foresaw, by operator and sizes of operands.
  std::unordered_map<std::uint64_t, std::vector<std::size_t>> results;
  std::uint64_t kind = 0; ///< the latest operator's key in `results`
  std::unordered_set<OperatorKey> names;
  std::size_t largest_result = 0;

  /// \param found it was there before; only now it is seen
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

  /// As the plan has it that is followed; nullopt: none is known.
  std::optional<planning::NextUse> next_use(StorageId storage) const;
  void see(std::span<const Access> accesses);
  /// What the latest operator is expected to make, from an earlier one of the same name with operands of the same
  /// sizes.
  void expect_results(OperatorKey key);
  void consider_planning();
  bool repeats(std::uint64_t operators);
  void plan_last(std::uint64_t operators, bool repeated);
  void end_marked_step();
  void solve(planning::KnownPlan& known);
  void advise();
  void retire(std::uint32_t part);
  void fetch(std::uint32_t part);
  void install(planning::KnownPlan& known);
  void ask_for_what_is_due(const planning::KnownPlan& known);
};

} // namespace torch_uvm
