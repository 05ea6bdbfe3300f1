// One iteration of a step that repeats: its operators, and the values (tensor slots) that they use.
//
// Temporaries are new storages in each iteration. A value stands for all the storages that take the same role, so that
// one iteration describes them all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "residency/policy/id_map.h"
#include "residency/policy/operator_log.h"

namespace torch_uvm::scheduling {

inline constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
inline constexpr StorageId kNoStorage = ~StorageId{0};

/// A list of numbers per operator, stored contiguously.
class Lists {
 public:
  void push(std::uint32_t value) {
    values_.push_back(value);
  }
  void close_list() {
    ends_.push_back(static_cast<std::uint32_t>(values_.size()));
  }
  std::span<const std::uint32_t> operator[](std::size_t index) const {
    const std::uint32_t begin = index == 0 ? 0 : ends_[index - 1];
    return {values_.data() + begin, ends_[index] - begin};
  }

 private:
  std::vector<std::uint32_t> values_;
  std::vector<std::uint32_t> ends_;
};

/// A value (tensor slot) of the iteration. A persistent one is the same storage in each iteration (a parameter); a
/// temporary is a new storage each time.
struct Value {
  std::size_t bytes = 0;
  StorageId persistent = kNoStorage; ///< the storage of a persistent value
  std::uint32_t created_at = kNone; ///< created in or after this operator; kNone: persistent
  std::uint32_t freed_at = kNone; ///< freed in or after this operator, cyclically; kNone: never
  StorageId latest = kNoStorage; ///< its storage in the recorded iteration
  bool pinned = false;
};

/// A use of a value by an operator, or its creation.
struct Use {
  std::uint32_t value = 0;
  std::uint32_t op = 0;
  std::uint32_t next = kNone; ///< the value's next use; wraps around if it is persistent; kNone: this is the last
  std::uint32_t distance = kNone; ///< number of operators until then, or until it is freed; kNone: neither
  bool is_creation = false;
  bool writes = false;
};

/// An iteration. Cyclic: the first operator follows the last one.
struct Iteration {
  struct Op {
    OperatorKey key = 0;
    std::size_t workspace = 0;
    std::uint32_t operands = 0; ///< number of its uses by operands, in order of accesses; they precede its births
    bool in_place_ok = false;
    float ms = 0; ///< duration with all operands on the device; 0 for all operators: unknown
    float host_ms = 0; ///< what the program takes to queue it; 0: not known
    bool waits = false; ///< the host waits for it: it reads a result
  };
  std::uint32_t steps = 1; ///< how often the program's operators repeat in it
  std::vector<Op> ops;
  std::vector<Value> values;
  std::vector<Use> uses; ///< in order of operators
  std::vector<std::uint32_t> use_begin; ///< by operator: its first use; one more entry for the end
  std::vector<std::vector<std::uint32_t>> uses_of; ///< by value, in order of operators, starting at its creation
  Lists frees; ///< by operator: the values freed in or after it
  IdMap<std::uint32_t> value_of; ///< persistent storages to values

  std::uint32_t size() const {
    return static_cast<std::uint32_t>(ops.size());
  }
  std::uint32_t after(std::uint32_t op) const {
    return op + 1 == size() ? 0 : op + 1;
  }
  std::span<const Use> at(std::uint32_t op) const {
    return {uses.data() + use_begin[op], use_begin[op + 1] - use_begin[op]};
  }
};

/// Makes an iteration from the last `operators` of the log.
/// \param period of the operators, and of as many before them: temporaries of the period before that are still alive
///   map to the values of the last one. 0: they do not repeat
Iteration make_iteration(const OperatorLog& log, std::uint64_t operators, std::uint64_t period);

/// Bytes of the temporaries of the `operators` before the last `operators`, which are equal, that are still alive when
/// their counterparts are created: a cache that grows, results that a variable holds until it is assigned again. An
/// iteration of twice as many operators has a value for each of the two; in one of `operators` they would be one.
std::size_t bytes_that_outlive(const OperatorLog& log, std::uint64_t operators);

} // namespace torch_uvm::scheduling
