// A log of the latest operators, and the detection of repetitions in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "residency/policy/decision.h"

namespace torch_uvm::scheduling {

/// A growing ring buffer of the latest elements, addressed by a monotonic index. Holds the elements with indices in
/// [first(), end()). `push` takes amortised constant time.
template <typename T>
class Ring {
 public:
  std::uint64_t first() const {
    return first_;
  }
  std::uint64_t end() const {
    return end_;
  }
  T& operator[](std::uint64_t index) {
    return slots_[index & (slots_.size() - 1)];
  }
  const T& operator[](std::uint64_t index) const {
    return slots_[index & (slots_.size() - 1)];
  }
  void push(const T& value) {
    if (end_ - first_ == slots_.size()) {
      grow();
    }
    (*this)[end_++] = value;
  }
  void drop_before(std::uint64_t index) {
    first_ = index;
  }

 private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 64 : 2 * slots_.size()); // a power of two
    for (std::uint64_t index = first_; index < end_; ++index) {
      larger[index & (larger.size() - 1)] = (*this)[index];
    }
    slots_.swap(larger);
  }

  std::vector<T> slots_;
  std::uint64_t first_ = 0;
  std::uint64_t end_ = 0;
};

struct LoggedAccess {
  StorageId storage = 0;
  std::uint64_t created_at = 0; ///< created, or first seen, in or after this operator
  std::size_t bytes = 0;
  bool writes = false;
  bool found = false; ///< it existed before it was first seen
};

struct LoggedCreation {
  StorageId storage = 0;
  std::size_t bytes = 0;
};

struct LoggedOperator {
  OperatorKey key = 0;
  std::uint64_t order = 0; ///< rolling hash of all signatures up to this one (see OperatorLog)
  std::uint64_t accesses = 0; ///< index of its first one in the log; likewise below
  std::uint64_t creations = 0;
  std::uint64_t frees = 0;
  std::size_t workspace = 0;
  bool in_place_ok = false;
};

/// An operand to log; each storage occurs once.
struct Operand {
  LoggedAccess access;
  std::uint64_t last_use = 0; ///< number of the operator that used it before this one; 0: none
};

/// Holds at most two iterations of the longest step that can be recognised. An operator takes constant time.
///
/// An operator's signature includes its reuse distances: for each operand, the number of operators since its last use.
/// In a step that repeats they are the same in each iteration, for parameters and for temporaries, which are new
/// storages each time. They also tell apart layers of the same shape. Where they do not (inference), `repeats` compares
/// parameters.
class OperatorLog {
 public:
  static constexpr std::uint64_t kLongestStep = 1 << 17; ///< in operators
  static constexpr std::uint64_t kMaxAccesses = 1 << 21;

  OperatorLog();

  /// Logs an operator. Operators are numbered from 1; this one gets the number `latest() + 1`.
  void begin(OperatorKey key, std::span<const Operand> operands, bool in_place_ok);
  void log_creation(const LoggedCreation& creation) {
    creations_.push(creation);
  }
  void log_free(StorageId storage) {
    frees_.push(storage);
  }
  void workspace(std::size_t bytes) {
    operators_[latest()].workspace = bytes;
  }

  std::uint64_t latest() const {
    return operators_.end() - 1;
  }
  /// Whether that many latest operators, and their accesses, are still in the log.
  bool holds(std::uint64_t operators) const {
    return operators <= latest() && operators_.first() <= latest() - operators + 1;
  }
  const LoggedOperator& operator[](std::uint64_t number) const {
    return operators_[number];
  }

  /// Calls `visit` with each access of an operator. Below: with each creation or release until the next operator
  /// begins.
  template <typename F>
  void accesses_of(std::uint64_t number, F&& visit) const {
    each_of(number, &LoggedOperator::accesses, accesses_, visit);
  }
  template <typename F>
  void creations_of(std::uint64_t number, F&& visit) const {
    each_of(number, &LoggedOperator::creations, creations_, visit);
  }
  template <typename F>
  void frees_of(std::uint64_t number, F&& visit) const {
    each_of(number, &LoggedOperator::frees, frees_, visit);
  }

  /// Length of a step that ends with the latest operator and seems to equal the step before it; 0: none. Compares
  /// hashes only; confirm with `repeats`.
  std::uint64_t candidate() const;
  /// Whether the last `operators` used the same persistent storages as the same number of operators before them.
  bool repeats(std::uint64_t operators, const std::function<bool(StorageId)>& is_alive);
  /// Whether the hashes of the last `operators` equal those of the same number of operators before them.
  bool may_repeat(std::uint64_t operators) const;
  /// Whether the operands of the last `operators` have nearly as many bytes as those of the operators before them,
  /// which are equal.
  bool sizes_repeat(std::uint64_t operators) const;

 private:
  struct Seen {
    std::uint64_t signature = 0;
    std::uint64_t number = 0;
  };

  template <typename T, typename F>
  void each_of(std::uint64_t number, std::uint64_t LoggedOperator::* first, const Ring<T>& ring, F&& visit) const {
    for (std::uint64_t at = operators_[number].*first;
         at < (number == latest() ? ring.end() : operators_[number + 1].*first); ++at) {
      visit(ring[at]);
    }
  }
  /// Whether the hash of the last `span` operators equals that of as many, `operators` before.
  bool equal_iterations(std::uint64_t operators, std::uint64_t span) const;
  void forget_the_oldest();

  Ring<LoggedOperator> operators_;
  Ring<LoggedAccess> accesses_;
  Ring<LoggedCreation> creations_;
  Ring<StorageId> frees_;
  std::vector<Seen> seen_; ///< latest operator by signature; a collision replaces the entry
  std::uint64_t since_same_ = 0; ///< number of operators since the latest one's signature was last seen
  std::uint64_t since_operand_ = 0; ///< its largest reuse distance
  std::uint64_t refused_ = 0; ///< a length that `repeats` refused; not tried before `refused_until_`
  std::uint64_t refused_until_ = 0; ///< the operator at which the difference has left both iterations
};

} // namespace torch_uvm::scheduling
