// A log of operators, written as a script of iterations, for tests of schedules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "residency/policy/decision.h"
#include "residency/policy/operator_log.h"
#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

/// The iteration of the last `operators`, which repeat.
inline Iteration make_iteration(const OperatorLog& log, std::uint64_t operators) {
  return make_iteration(log, operators, operators);
}

} // namespace torch_uvm::scheduling

namespace script {

using namespace torch_uvm;
using namespace torch_uvm::scheduling;

/// Bytes a millisecond of a link that costs neither the host nor kernels anything.
inline LinkRates ideal(double into, double out, double in_place) {
  return {into, out, in_place, into + out, 0, 0};
}

struct Birth {
  StorageId storage;
  std::size_t bytes;
};

/// Appends iterations to a log, as the policy would. Temporaries have names above 100, the same in each iteration.
class Script {
 public:
  explicit Script(std::map<StorageId, std::size_t> parameters) {
    for (const auto& [storage, bytes] : parameters) {
      live_[storage] = {storage, 0, 0, bytes};
      log_.log_creation({storage, bytes});
    }
  }
  void op(OperatorKey key, const std::vector<std::pair<StorageId, bool>>& uses, const std::vector<Birth>& births = {},
          const std::vector<StorageId>& frees = {}, bool in_place_ok = false, std::size_t workspace = 0) {
    std::vector<Operand> operands;
    const std::uint64_t number = log_.latest() + 1;
    for (const auto& [name, writes] : uses) {
      Live& it = live_.at(name);
      operands.push_back({{it.id, it.created_at, it.bytes, writes}, it.last_use});
      it.last_use = number;
    }
    log_.begin(key, operands, in_place_ok);
    log_.workspace(workspace);
    for (const Birth& created_at : births) {
      live_[created_at.storage] = {next_++, number, 0, created_at.bytes};
      log_.log_creation({live_[created_at.storage].id, created_at.bytes});
    }
    for (const StorageId name : frees) {
      log_.log_free(live_.at(name).id);
      live_.erase(name);
    }
  }
  OperatorLog& log() {
    return log_;
  }
  const OperatorLog& log() const {
    return log_;
  }

 private:
  struct Live {
    StorageId id;
    std::uint64_t created_at, last_use;
    std::size_t bytes;
  };
  OperatorLog log_;
  std::map<StorageId, Live> live_;
  StorageId next_ = 1000;
};

inline PolicyOptions options(std::size_t budget, bool in_place = true) {
  PolicyOptions result;
  result.budget = budget;
  result.in_place = in_place;
  return result;
}

inline scheduling::Schedule timed(scheduling::Iteration iteration, const std::vector<float>& ms) {
  scheduling::Schedule schedule;
  schedule.iteration = std::move(iteration);
  for (std::size_t op = 0; op < ms.size(); ++op) {
    schedule.iteration.ops[op].ms = ms[op];
  }
  return schedule;
}

/// By operator: the persistent storages that are evicted after it.
inline std::string evictions(const scheduling::Schedule& schedule) {
  std::string text;
  for (std::uint32_t use = 0; use < schedule.iteration.uses.size(); ++use) {
    if (schedule.evicted_after[use]) {
      const scheduling::Use& it = schedule.iteration.uses[use];
      text += (text.empty() ? "" : " ") + std::to_string(it.op) + ':' +
              std::to_string(schedule.iteration.values[it.value].persistent);
    }
  }
  return text;
}

} // namespace script
