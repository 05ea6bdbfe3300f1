#include "residency/policy/iteration.h"

#include <algorithm>
#include <utility>

namespace torch_uvm::scheduling {

namespace {

/// Number of operators from one to another, forwards. From an operator to itself it is a whole iteration.
std::uint32_t distance(std::uint32_t from, std::uint32_t to, std::uint32_t size) {
  return to > from ? to - from : to + size - from;
}

class IterationBuilder {
 public:
  IterationBuilder(const OperatorLog& log, std::uint64_t operators, std::uint64_t period)
      : log_(log),
        first_(log.latest() - operators + 1),
        size_(static_cast<std::uint32_t>(operators)),
        period_(static_cast<std::uint32_t>(period)) {}

  Iteration make() {
    iteration_.steps = period_ == 0 ? 1 : size_ / period_;
    add_created_values();
    for (std::uint32_t op = 0; op < size_; ++op) {
      add_operator(op);
    }
    iteration_.use_begin.push_back(static_cast<std::uint32_t>(iteration_.uses.size()));
    connect();
    return std::move(iteration_);
  }

 private:
  std::uint32_t add_value(const Value& value) {
    iteration_.values.push_back(value);
    return static_cast<std::uint32_t>(iteration_.values.size() - 1);
  }

  /// Makes a value for each storage created in this iteration. The storage created at the same place in the previous
  /// iteration maps to the same value.
  void add_created_values() {
    std::vector<std::uint32_t> here;
    for (std::uint32_t op = 0; op < size_; ++op) {
      here.clear();
      log_.creations_of(first_ + op, [&](const LoggedCreation& creation) {
        here.push_back(add_value({creation.bytes, kNoStorage, op, kNone, creation.storage, false}));
        temporaries_[creation.storage] = here.back();
        births_.push(here.back());
      });
      births_.close_list();
      const std::uint64_t ago = log_.latest() + 1 - (first_ + op) + size_;
      if (op < size_ - period_ || !log_.holds(ago) || log_[first_ + op].key != log_[first_ + op - size_].key) {
        continue;
      }
      std::size_t place = 0;
      log_.creations_of(first_ + op - size_, [&](const LoggedCreation& creation) {
        if (place < here.size()) {
          temporaries_[creation.storage] = here[place];
        }
        ++place;
      });
    }
  }

  void add_operator(std::uint32_t op) {
    const LoggedOperator& logged = log_[first_ + op];
    iteration_.use_begin.push_back(static_cast<std::uint32_t>(iteration_.uses.size()));
    std::uint32_t operands = 0;
    log_.accesses_of(first_ + op, [&](const LoggedAccess& access) {
      iteration_.uses.push_back({value_of(access), op, kNone, kNone, false, access.writes});
      ++operands;
    });
    for (const std::uint32_t value : births_[op]) {
      iteration_.uses.push_back({value, op, kNone, kNone, true, true});
    }
    iteration_.ops.push_back({logged.key, logged.workspace, operands, logged.in_place_ok});
    log_.frees_of(first_ + op, [&](StorageId storage) {
      const std::uint32_t* value = temporaries_.find(storage);
      if (value != nullptr && iteration_.values[*value].freed_at == kNone) {
        iteration_.values[*value].freed_at = op;
        iteration_.frees.push(*value);
      }
    });
    iteration_.frees.close_list();
  }

  std::uint32_t value_of(const LoggedAccess& access) {
    if (const std::uint32_t* value = temporaries_.find(access.storage)) {
      return *value;
    }
    if (const std::uint32_t* value = iteration_.value_of.find(access.storage)) {
      return *value;
    }
    return iteration_.value_of[access.storage] =
               add_value({access.bytes, access.storage, kNone, kNone, access.storage, false});
  }

  void connect() {
    iteration_.uses_of.resize(iteration_.values.size());
    for (std::uint32_t use = 0; use < iteration_.uses.size(); ++use) {
      iteration_.uses_of[iteration_.uses[use].value].push_back(use);
    }
    for (std::uint32_t value = 0; value < iteration_.values.size(); ++value) {
      std::vector<std::uint32_t>& uses = iteration_.uses_of[value];
      const Value& it = iteration_.values[value];
      const bool persistent = it.created_at == kNone;
      if (!persistent) { // uses before its creation belong to the next iteration
        const auto creation =
            std::find_if(uses.begin(), uses.end(), [&](std::uint32_t use) { return iteration_.uses[use].is_creation; });
        std::rotate(uses.begin(), creation, uses.end());
      }
      for (std::size_t at = 0; at < uses.size(); ++at) {
        Use& use = iteration_.uses[uses[at]];
        if (at + 1 < uses.size() || persistent) {
          use.next = uses[(at + 1) % uses.size()];
          use.distance = distance(use.op, iteration_.uses[use.next].op, size_);
        } else if (it.freed_at != kNone) {
          use.distance = it.freed_at == use.op ? 0 : distance(use.op, it.freed_at, size_);
        }
      }
    }
  }

  const OperatorLog& log_;
  std::uint64_t first_;
  std::uint32_t size_;
  std::uint32_t period_;
  Iteration iteration_;
  Lists births_;
  IdMap<std::uint32_t> temporaries_;
};

} // namespace

Iteration make_iteration(const OperatorLog& log, std::uint64_t operators, std::uint64_t period) {
  return IterationBuilder(log, operators, period).make();
}

std::size_t bytes_that_outlive(const OperatorLog& log, std::uint64_t operators) {
  struct Created {
    std::uint64_t after = 0; ///< which operator
    std::size_t bytes = 0;
  };
  const std::uint64_t first = log.latest() - operators + 1;
  IdMap<Created> created;
  for (std::uint64_t number = first - operators; number < first; ++number) {
    log.creations_of(number, [&](const LoggedCreation& it) { created[it.storage] = {number, it.bytes}; });
  }
  std::size_t outlive = 0;
  for (std::uint64_t number = first; number <= log.latest(); ++number) {
    const auto look = [&](StorageId storage) {
      Created* const it = created.find(storage);
      if (it != nullptr && number - it->after >= operators) {
        outlive += std::exchange(it->bytes, 0);
      }
    };
    log.accesses_of(number, [&](const LoggedAccess& access) { look(access.storage); });
    log.frees_of(number, look);
  }
  return outlive;
}

} // namespace torch_uvm::scheduling
