// Where in which known plan the program is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "residency/policy/flat_map.h"
#include "residency/policy/lap.h"
#include "residency/policy/plan.h"

namespace torch_uvm::planning {

/// What the policy knows of a live storage.
struct StorageState {
  std::size_t bytes = 0;
  std::uint64_t birth = 0; ///< the operator that it was born in or after
  std::uint64_t last_use = 0;
  std::uint32_t operand = 0; ///< its place among the operands of that operator
  std::uint32_t part = kNone; ///< in the plan with the number below
  std::uint64_t plan = 0;
  bool found = false; ///< it was there before, when it was seen first
  bool persistent = false; ///< in some plan
  bool held = false;
};

struct SeenOperand {
  StorageId storage = 0;
  StorageState* state = nullptr;
};

/// A plan, and what is needed to find one's place in it.
struct KnownPlan {
  Plan plan;
  std::uint64_t number = 0; ///< counts from 1
  std::uint64_t options = 0; ///< the version of the options that it was made for; 0: none yet
  std::uint64_t followed = 0; ///< operators
  std::uint64_t last_followed = 0;
  std::size_t drift = 0; ///< bytes by which births differed in this lap
  std::size_t born = 0; ///< bytes born in a lap as planned
  bool stale = false; ///< sizes are others by now
  bool installed = false;
  std::vector<StorageId> bound; ///< by part: the storage that plays it now
  FlatMap<std::uint32_t> places; ///< by the hash of operators in a row: the last of them
  std::vector<std::uint32_t> same_place; ///< by operator: another one with this hash; kNone: no other
};

class Follower {
 public:
  static constexpr std::size_t kMostPlans = 8;

  /// Where the latest operator is; nullptr: in no plan.
  KnownPlan* current() const {
    return current_;
  }
  std::uint32_t position() const {
    return position_;
  }
  /// Whether the latest operator did what the plan had foreseen.
  bool matched() const {
    return matched_;
  }
  /// Operators in a row that did.
  std::uint64_t in_a_row() const {
    return in_a_row_;
  }

  /// The plan of what ran last: its last operator is the latest one.
  void add(Plan plan, std::uint64_t now, FlatMap<StorageState>& storages);
  /// Plans that have not been followed for a lap.
  unsigned unproved() const;

  enum class Step { kAsPlanned, kFoundAgain, kMissed, kLost };
  Step begin(OperatorKey key, std::span<const SeenOperand> operands, std::uint64_t now);
  /// A storage was born in or after the latest operator, the `place`th since it began.
  void born(StorageId storage, StorageState& state, std::size_t place);
  void died(const StorageState& state);

  /// The part that a storage plays in the current plan; kNone: none.
  std::uint32_t part_of(StorageId storage, const StorageState& state) const;

 private:
  bool matches(KnownPlan& known, std::uint32_t op, OperatorKey key, std::span<const SeenOperand> operands) const;
  void bind(KnownPlan& known, std::uint32_t op, std::span<const SeenOperand> operands);
  bool find_again(OperatorKey key, std::span<const SeenOperand> operands);
  void go_to(KnownPlan* known, std::uint32_t op, std::span<const SeenOperand> operands);

  std::vector<std::unique_ptr<KnownPlan>> plans_;
  KnownPlan* current_ = nullptr;
  std::uint32_t position_ = 0;
  bool matched_ = false;
  unsigned strayed_ = 0; ///< operators since the latest that matched
  std::uint64_t in_a_row_ = 0;
  std::uint64_t plans_made_ = 0;
  std::uint64_t window_[3] = {}; ///< hashes of the latest operators
};

} // namespace torch_uvm::planning
