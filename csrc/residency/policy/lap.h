// One lap of a step that repeats: its operators, and the storages they use by the part they play in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "residency/policy/flat_map.h"
#include "residency/policy/operator_log.h"

namespace torch_uvm::planning {

inline constexpr std::uint32_t kNone = std::numeric_limits<std::uint32_t>::max();
inline constexpr StorageId kNoStorage = ~StorageId{0};

/// Lists of numbers, one for each operator, in one piece.
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
  std::uint32_t begin_of(std::size_t index) const {
    return index == 0 ? 0 : ends_[index - 1];
  }

 private:
  std::vector<std::uint32_t> values_;
  std::vector<std::uint32_t> ends_;
};

/// A part that a storage plays: a parameter, always the same one, or a temporary, a new one in each lap.
struct Part {
  std::size_t bytes = 0;
  StorageId persistent = kNoStorage;
  std::uint32_t birth = kNone; ///< the operator that it is born in or after; kNone: persistent
  std::uint32_t death =
      kNone; ///< the operator in or after which it dies, of the next lap if not after the birth; kNone: never
  StorageId latest = kNoStorage; ///< the storage that played it in the lap
  bool held = false;
};

/// An event of a part: its birth, or a use by an operator.
struct Event {
  std::uint32_t part = 0;
  std::uint32_t op = 0;
  std::uint32_t next =
      kNone; ///< the part's next event, the first again after the last of a persistent one; kNone: dies
  std::uint32_t distance = kNone; ///< operators until then, or until it dies; kNone: neither comes
  bool birth = false;
  bool writes = false;
};

/// Cyclic: after the last operator comes the first one again.
struct Lap {
  struct Op {
    OperatorKey key = 0;
    std::size_t workspace = 0;
    std::uint32_t operands = 0; ///< its events that are no births come first, in order of the accesses
    bool in_place_ok = false;
  };
  std::vector<Op> ops;
  std::vector<Part> parts;
  std::vector<Event> events; ///< in order of operators
  std::vector<std::uint32_t> event_begin; ///< by operator, and the end
  std::vector<std::vector<std::uint32_t>> events_of; ///< by part, in order of operators, from the birth on
  Lists deaths; ///< by operator: parts
  FlatMap<std::uint32_t> part_of; ///< persistent storages

  std::uint32_t size() const {
    return static_cast<std::uint32_t>(ops.size());
  }
  std::uint32_t after(std::uint32_t op) const {
    return op + 1 == size() ? 0 : op + 1;
  }
  std::span<const Event> at(std::uint32_t op) const {
    return {events.data() + event_begin[op], event_begin[op + 1] - event_begin[op]};
  }
};

/// The last `operators` of the log as a lap.
/// \param repeated those before them equal them: temporaries of theirs that live on play the same parts
Lap make_lap(const OperatorLog& log, std::uint64_t operators, bool repeated = true);

} // namespace torch_uvm::planning
