// The residency policy: decides which storages to keep on a device, to prefetch and to evict.
//
// The policy receives events in order: storages are created and freed, outermost operators begin and end. It recognises
// steps that repeat, makes a schedule for one iteration, and returns at each operator which transfers to start. It
// touches no memory and uses no runtime, threads or clock. There is one policy per device; the caller serialises calls.
//
// Decisions are advice: the caller may carry them out late or ignore them. It skips fetches of storages that are
// resident and retirements of those that are on the host. Decisions affect only time, never results.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "residency/policy/decision.h"
#include "residency/policy/matcher.h"
#include "residency/policy/operator_log.h"

namespace torch_uvm {

class Policy {
 public:
  struct Counters {
    std::uint64_t plan_hits = 0; ///< operators that matched the schedule
    std::uint64_t plan_misses = 0; ///< operators that did not match, or for which there was no schedule
    std::uint64_t schedules_made = 0;
    std::uint64_t resynchronised = 0; ///< how often the position in a schedule was found again after a mismatch
    bool following = false; ///< the latest operator matched the schedule
  };

  explicit Policy(PolicyOptions options = {}) : options_(options) {}
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  /// Schedules made for other options are recomputed when they are next followed.
  void set_options(const PolicyOptions& options);

  /// A storage that no operator created (a parameter, an input) was seen for the first time, or was resized.
  /// \param bytes that it takes on the device, here as in `end`: of its block, which may be larger than the storage
  void created(StorageId storage, std::size_t bytes);
  void freed(StorageId storage);
  /// Pins a storage (exports, `keep_resident`) or unpins it. The next schedule counts the bytes of pinned storages as
  /// always resident, and neither retires nor fetches them. Does not nest: the caller counts the pins.
  void pin(StorageId storage, bool pinned);

  /// An outermost operator is about to run. Storages without a `created` count as having no bytes.
  /// \param in_place_ok the operator reads or writes each byte about once (optimizers, embeddings)
  /// \return the sizes of its results. Fetches are returned by `end`, when its operands may be moved again
  const Decision& begin(OperatorKey key, std::span<const Access> accesses, bool in_place_ok);
  /// The operator has ended: its kernels are queued. If several threads run operators at once, this refers to the one
  /// that began last.
  /// \param births new storages that outlive the operator, in order of creation, with their bytes
  /// \param workspace peak of temporary bytes while it ran
  const Decision& end(std::span<const std::pair<StorageId, std::size_t>> births, std::size_t workspace);

  /// An operator ran on the device, without waits for transfers. They are numbered from 1, in order of `begin`.
  /// Durations may be reported late, and in any order. Reports after others have begun to mismatch are ignored.
  /// \param in_place it used operands on the host, at the link's rate
  /// \param host_ms what the program took to queue it; 0: not known
  /// \param waited the host waited for it
  void ran(std::uint64_t number, double ms, bool in_place = false, double host_ms = 0, bool waited = false);

  /// A step ends here: the user said so, or an optimizer has run. Repeated steps are recognised without it; alternating
  /// steps need it.
  void mark_step() {
    step_ended_ = true; // what the step leaves is freed until the next operator: gradients, by zero_grad
  }

  /// The program has stopped for now: no use is scheduled until its operators match a schedule again.
  void stop() {
    matcher_.lose();
  }

  /// Number of operators from the latest one to the storage's next scheduled use. Infinity if none is known.
  double next_use(StorageId storage) const;
  /// The same if the schedule has the next use on the device. Infinity if it is on the host or none is known.
  double next_use_on_device(StorageId storage) const;
  /// Whether the latest operator should use the storage on the host if it is not resident, rather than fetch it.
  bool use_in_place(StorageId storage) const;

  const Counters& counters() const {
    return counters_;
  }
  /// Whether the latest operator matched a schedule that is final: durations are known. True if the caller reports no
  /// durations.
  bool is_settled() const;
  /// The most bytes that its storages have had together since this was last asked.
  std::size_t take_peak_bytes() {
    return std::exchange(peak_bytes_, bytes_);
  }
  /// Number of operators that have begun.
  std::uint64_t operators() const {
    return log_.latest();
  }
  /// Number of operators in the current schedule; 0 if the latest operator did not match one.
  std::uint64_t step_length() const {
    const scheduling::Schedule* const current = schedule().first;
    return current == nullptr ? 0 : current->iteration.size();
  }
  /// The current schedule, and the place of the latest operator in it. nullptr if that did not match one. Valid until
  /// the next call.
  std::pair<const scheduling::Schedule*, std::uint32_t> schedule() const {
    return {matcher_.matched() ? &matcher_.current()->schedule : nullptr, matcher_.position()};
  }

 private:
  static constexpr std::size_t kMarkedSteps = 16; ///< number of marked steps to remember

  // policy.cpp

  /// Starts tracking a storage. \param found it existed before and is seen only now
  scheduling::StorageState& created_now(StorageId storage, std::size_t bytes, bool found);
  /// The storage's next use in the current schedule; nullopt if none is known.
  std::optional<scheduling::NextUse> find_next_use(StorageId storage) const;
  /// Collects the operands of the operator that begins, each storage once.
  void see(std::span<const Access> accesses);
  /// Predicts the operator's results and workspace from an earlier operator of the same name and operand sizes.
  void expect_results(OperatorKey key);
  /// Fills `decision_` from the current schedule and position.
  void advise();
  /// Adds the storage that the value has now, unless it is pinned.
  void add_to(std::vector<StorageId>& storages_to_move, std::uint32_t value) const;
  void ask_for_what_is_due(const scheduling::KnownSchedule& known);

  // policy_scheduling.cpp

  /// Makes a schedule if the latest operators repeat those before them and it is time for one.
  void consider_scheduling();
  bool repeats(std::uint64_t operators);
  /// Makes a schedule from the last `operators`. \param period see make_iteration \param next when to make another
  void schedule_last(std::uint64_t operators, std::uint64_t period, std::uint64_t& next);
  /// Makes a schedule of the operators between two step marks if the same were seen before.
  void end_marked_step();
  /// (Re)computes a schedule for the current options and pins.
  void solve(scheduling::KnownSchedule& known);

  // policy_durations.cpp

  /// Asks for the durations that the policy wants, in `decision_`.
  void ask_for_durations();

  PolicyOptions options_;
  std::uint64_t options_version_ = 1;
  IdMap<scheduling::StorageState> storages_;
  std::size_t bytes_ = 0; ///< of `storages_`
  std::size_t peak_bytes_ = 0;
  scheduling::OperatorLog log_;
  scheduling::Matcher matcher_;
  Counters counters_;
  Decision decision_;
  std::vector<scheduling::Operand> operands_; ///< of the latest operator
  std::vector<scheduling::SeenOperand> seen_;
  std::size_t created_ = 0; ///< number of storages created since it began
  bool in_place_ok_ = false;
  bool catch_up_ = false; ///< the position has jumped: issue the fetches that are already due
  bool forget_ = false;
  std::uint64_t next_scheduling_ = 0; ///< the earliest operator at which to make another schedule of repeated operators
  std::uint64_t next_marked_scheduling_ = 0; ///< likewise, of a marked step
  bool step_ended_ = false; ///< a step mark came since the latest operator
  std::uint64_t last_mark_ = 0; ///< the operator at the latest step mark
  std::uint64_t mark_before_ = 0; ///< the operator at the step mark before that
  std::array<std::uint64_t, kMarkedSteps> marked_{}; ///< hashes of the latest marked steps
  std::size_t next_marked_ = 0;
  struct Results {
    std::vector<std::size_t> births; ///< their sizes
    std::size_t workspace = 0;
  };
  /// Of operators that matched no schedule, by hash of operator and operand sizes.
  std::unordered_map<std::uint64_t, Results> results_;
  std::uint64_t kind_ = 0; ///< the latest operator's key in `results_`
  std::unordered_set<OperatorKey> names_;
  std::size_t largest_result_ = 0;
};

} // namespace torch_uvm
