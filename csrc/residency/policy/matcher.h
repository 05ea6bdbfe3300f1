// The matcher: tracks the program's position in the known schedules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "residency/policy/id_map.h"
#include "residency/policy/iteration.h"
#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

/// The policy's state of a live storage.
struct StorageState {
  std::size_t bytes = 0;
  std::uint64_t created_at = 0; ///< created, or first seen, in or after this operator
  std::uint64_t last_use = 0; ///< operator number
  std::uint32_t operand = 0; ///< its index among the operands of that operator
  std::uint32_t value = kNone; ///< its value in the schedule numbered `schedule`
  std::uint64_t schedule = 0; ///< KnownSchedule::number; 0: none
  bool found = false; ///< it existed before it was first seen
  bool persistent = false; ///< a persistent value of some schedule
  bool pinned = false;
};

struct SeenOperand {
  StorageId storage = 0;
  StorageState* state = nullptr;
};

/// A schedule, and the index to find a position in it.
struct KnownSchedule {
  static constexpr std::uint64_t kMaxAsked = 16; ///< iterations

  Schedule schedule;
  std::uint64_t number = 0; ///< counts from 1
  std::uint64_t options = 0; ///< version of the options that it was computed for; 0: not yet computed
  std::uint64_t followed = 0; ///< number of operators that matched it
  std::uint64_t last_followed = 0; ///< the latest operator that matched it
  std::size_t drift = 0; ///< bytes by which created storages have differed in this iteration
  std::size_t created = 0; ///< bytes created in an iteration, as recorded
  bool stale = false; ///< sizes differed too much in the last iteration
  std::vector<unsigned> timed; ///< by operator: how often its duration was reported; empty: never
  std::vector<bool> slowed; ///< by operator: in each report it used operands on the host; like `timed`
  std::uint32_t untimed = kNone; ///< number of operators whose duration was reported too seldom; kNone: none was
  std::uint64_t asked = 0; ///< number of operators whose duration was asked for

  /// Whether durations are still missing. Operators that threads mix may never be timed, so asking ends.
  bool wants_durations() const {
    return untimed != 0 && asked <= kMaxAsked * schedule.iteration.size();
  }
  std::vector<StorageId> bound; ///< by value: its current storage
  IdMap<std::uint32_t> places; ///< hash of three consecutive operators, to 1 + the last of them
  std::vector<std::uint32_t> same_place; ///< by operator: the next one with the same hash; kNone: no other
};

class Matcher {
 public:
  static constexpr std::size_t kMaxSchedules = 8;

  /// The schedule being followed; nullptr: none.
  KnownSchedule* current() const {
    return current_;
  }
  std::uint32_t position() const {
    return position_;
  }
  /// Whether the latest operator matched the schedule.
  bool matched() const {
    return matched_;
  }
  /// Number of consecutive operators that came in the scheduled order.
  std::uint64_t in_a_row() const {
    return in_a_row_;
  }

  /// Adds the schedule of the latest iteration, whose last operator is the latest one, and follows it. Replaces the
  /// least recently followed schedule if there are too many.
  void add(Schedule schedule, std::uint64_t now, IdMap<StorageState>& storages);
  /// Number of unproven schedules: those for this version of the options that fewer operators than one iteration have
  /// matched.
  unsigned unproven(std::uint64_t options) const;

  /// Follows no schedule until operators match one again.
  void lose() {
    current_ = nullptr;
    matched_ = false;
  }
  enum class Match { kMatched, kResynchronised, kMissed, kLost };
  Match begin(OperatorKey key, std::span<const SeenOperand> operands, std::uint64_t now);
  /// A storage was created in or after the latest operator, as number `place` (from 0) since the operator began.
  void created(StorageId storage, StorageState& state, std::size_t place);
  void freed(const StorageState& state);

  /// The storage's value in the current schedule; kNone: none.
  std::uint32_t value_of(StorageId storage, const StorageState& state) const;

 private:
  bool matches(KnownSchedule& known, std::uint32_t op, OperatorKey key, std::span<const SeenOperand> operands) const;
  void bind(KnownSchedule& known, std::uint32_t op, std::span<const SeenOperand> operands);
  bool resynchronise(OperatorKey key, std::span<const SeenOperand> operands);
  void go_to(KnownSchedule* known, std::uint32_t op, std::span<const SeenOperand> operands);

  std::vector<std::unique_ptr<KnownSchedule>> schedules_;
  KnownSchedule* current_ = nullptr;
  std::uint32_t position_ = 0;
  bool matched_ = false;
  unsigned mismatches_ = 0; ///< number of mismatches since the latest match
  std::uint64_t in_a_row_ = 0;
  std::uint64_t schedules_made_ = 0;
  std::uint64_t window_[3] = {}; ///< hashes of the latest three operators
};

} // namespace torch_uvm::scheduling
