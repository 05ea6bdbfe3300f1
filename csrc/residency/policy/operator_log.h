// The operators that ran last, and whether they repeat.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "residency/policy/decision.h"
#include "residency/policy/ring.h"

namespace torch_uvm::planning {

struct LoggedAccess {
  StorageId storage = 0;
  std::uint64_t birth = 0; ///< the operator that it was born in or after
  std::size_t bytes = 0;
  bool writes = false;
  bool found = false; ///< it was there before `birth`, when it was seen first
};

struct LoggedBirth {
  StorageId storage = 0;
  std::size_t bytes = 0;
};

struct LoggedOperator {
  OperatorKey key = 0;
  std::uint64_t order = 0; ///< hash of all operators up to this one: what they are and which operands recur where
  std::uint64_t sizes = 0; ///< hash of all operands' bytes up to this one
  std::uint64_t accesses = 0; ///< where its own begin
  std::uint64_t births = 0;
  std::uint64_t deaths = 0;
  std::size_t workspace = 0;
  bool in_place_ok = false;
};

/// An operand as it is logged: each storage once.
struct Operand {
  LoggedAccess access;
  std::uint64_t last_use = 0; ///< before this operator; 0: none
};

/// Two laps of the longest step that can be recognised, at most. An operator costs constant time.
///
/// An operator's signature has, for each operand, how many operators ago it was used last. In a step that repeats
/// these distances do, too, for parameters as for temporaries, which are new storages each time. Layers that look
/// alike differ by it; where they do not (inference), `repeats` tells them apart by their parameters.
class OperatorLog {
 public:
  static constexpr std::uint64_t kLongestStep = 1 << 17; ///< operators
  static constexpr std::uint64_t kMostAccesses = 1 << 21;

  OperatorLog();

  /// The operators have the numbers 1, 2, ...; this one gets `latest() + 1`.
  void begin(OperatorKey key, std::span<const Operand> operands, bool in_place_ok);
  void birth(const LoggedBirth& birth) {
    births_.push(birth);
  }
  void death(StorageId storage) {
    deaths_.push(storage);
  }
  void workspace(std::size_t bytes) {
    operators_[latest()].workspace = bytes;
  }

  std::uint64_t latest() const {
    return operators_.end() - 1;
  }
  const LoggedOperator& operator[](std::uint64_t number) const {
    return operators_[number];
  }

  /// Calls `visit` with each access of an operator, birth, or death (until the next operator begins).
  template <typename F>
  void accesses_of(std::uint64_t number, F&& visit) const {
    for (std::uint64_t at = operators_[number].accesses; at < after(number, &LoggedOperator::accesses, accesses_);
         ++at) {
      visit(accesses_[at]);
    }
  }
  template <typename F>
  void births_of(std::uint64_t number, F&& visit) const {
    for (std::uint64_t at = operators_[number].births; at < after(number, &LoggedOperator::births, births_); ++at) {
      visit(births_[at]);
    }
  }
  template <typename F>
  void deaths_of(std::uint64_t number, F&& visit) const {
    for (std::uint64_t at = operators_[number].deaths; at < after(number, &LoggedOperator::deaths, deaths_); ++at) {
      visit(deaths_[at]);
    }
  }

  /// How many operators the step may have that ends with the latest one and equals the one before; 0: none seems to.
  /// Told by hashes: `repeats` makes sure.
  std::uint64_t candidate() const;
  /// Whether the last `operators` used the same persistent storages as those before them, operator by operator.
  bool repeats(std::uint64_t operators, const std::function<bool(StorageId)>& is_alive);
  /// Whether as many operators before them were alike, by hashes.
  bool may_repeat(std::uint64_t operators) const;
  /// ... and operands of the same bytes.
  bool sizes_repeat(std::uint64_t operators) const;

 private:
  struct Seen {
    std::uint64_t signature = 0;
    std::uint64_t number = 0;
  };

  template <typename T>
  std::uint64_t after(std::uint64_t number, std::uint64_t LoggedOperator::* field, const Ring<T>& ring) const {
    return number == latest() ? ring.end() : operators_[number + 1].*field;
  }
  bool equal_laps(std::uint64_t operators, std::uint64_t span, std::uint64_t LoggedOperator::* hash) const;
  void forget_the_oldest();

  Ring<LoggedOperator> operators_;
  Ring<LoggedAccess> accesses_;
  Ring<LoggedBirth> births_;
  Ring<StorageId> deaths_;
  std::vector<Seen> seen_; ///< by signature, the latest; one that collides takes the place
  std::uint64_t since_same_ = 0; ///< operators since the latest one's signature was seen before
  std::uint64_t since_operand_ = 0; ///< since its operand that was used longest ago
  std::uint64_t refused_ = 0; ///< a length that `repeats` refused, until what spoke against it has passed
  std::uint64_t refused_until_ = 0;
};

} // namespace torch_uvm::planning
