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
#include "residency/policy/iteration.h"
#include "residency/policy/matcher.h"
#include "residency/policy/operator_log.h"
#include "residency/policy/policy.h"
#include "residency/policy/schedule.h"

namespace torch_uvm {

struct Policy::State {
  static constexpr std::size_t kMarkedSteps = 16; ///< number of marked steps to remember
  static constexpr std::size_t kMaxResults = 4096; ///< entries of `results`

  PolicyOptions options;
  std::uint64_t options_version = 1;
  FlatMap<scheduling::StorageState> storages;
  scheduling::OperatorLog log;
  scheduling::Matcher matcher;
  Counters counters;
  Decision decision;
  std::vector<scheduling::Operand> operands; ///< of the latest operator
  std::vector<scheduling::SeenOperand> seen;
  std::size_t created = 0; ///< number of storages created since it began
  bool in_place_ok = false;
  bool catch_up = false; ///< the position has jumped: issue the fetches that are already due
  bool forget = false;
  std::uint64_t next_scheduling = 0; ///< the earliest operator at which to make another schedule of repeated operators
  std::uint64_t next_marked_scheduling = 0; ///< likewise, of a marked step
  bool step_ended = false; ///< a step mark came since the latest operator
  std::uint64_t last_mark = 0; ///< the operator at the latest step mark
  std::uint64_t mark_before = 0; ///< the operator at the step mark before that
  std::array<std::uint64_t, kMarkedSteps> marked{}; ///< hashes of the latest marked steps
  std::size_t next_marked = 0;
  struct Results {
    std::vector<std::size_t> births; ///< their sizes
    std::size_t workspace = 0;
  };
  /// Of operators that matched no schedule, by hash of operator and operand sizes.
  std::unordered_map<std::uint64_t, Results> results;
  std::uint64_t kind = 0; ///< the latest operator's key in `results`
  std::unordered_set<OperatorKey> names;
  std::size_t largest_result = 0;

  /// Starts tracking a storage. \param found it existed before and is seen only now
  scheduling::StorageState& created_now(StorageId storage, std::size_t bytes, bool found) {
    scheduling::StorageState& state = storages[storage];
    state = scheduling::StorageState{};
    state.found = found;
    state.bytes = bytes;
    state.created_at = log.latest();
    log.log_creation({storage, bytes});
    matcher.created(storage, state, created++);
    return state;
  }

  /// The storage's next use in the current schedule; nullopt if none is known.
  std::optional<scheduling::NextUse> next_use(StorageId storage) const;
  /// Collects the operands of the operator that begins, each storage once.
  void see(std::span<const Access> accesses);
  /// Predicts the operator's results and workspace from an earlier operator of the same name and operand sizes.
  void expect_results(OperatorKey key);
  /// Makes a schedule if the latest operators repeat those before them and it is time for one.
  void consider_scheduling();
  bool repeats(std::uint64_t operators);
  /// Makes a schedule of operators that repeat.
  void schedule_repeated(std::uint64_t operators);
  /// Makes a schedule from the last `operators`. \param period see make_iteration \param next when to make another
  void schedule_last(std::uint64_t operators, std::uint64_t period, std::uint64_t& next);
  /// Makes a schedule of the operators between two step marks if the same were seen before.
  void end_marked_step();
  /// (Re)computes a schedule for the current options and pins.
  void solve(scheduling::KnownSchedule& known);
  /// Asks for the durations that the policy wants, in `decision`.
  void ask_for_durations();
  /// Fills `decision` from the current schedule and position.
  void advise();
  /// Adds the storage that the value has now, unless it is pinned.
  void add_to(std::vector<StorageId>& storages_to_move, std::uint32_t value) const;
  void ask_for_what_is_due(const scheduling::KnownSchedule& known);
};

} // namespace torch_uvm
