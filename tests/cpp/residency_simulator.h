// Executes a policy's decisions on a synthetic program in modelled time, as the engine does, but without memory.
//
// A program is a sequence of operators on named storages, divided into steps. Names are local to a step, which creates
// new storages each time, unless they are declared. The link has one queue for each direction. An operator waits for
// its operands and for room.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "harness.h"
#include "residency/policy/policy.h"

namespace simulator {

using torch_uvm::Access;
using torch_uvm::Decision;
using torch_uvm::OperatorKey;
using torch_uvm::Policy;
using torch_uvm::PolicyOptions;
using torch_uvm::StorageId;

struct Use {
  std::string name;
  bool writes = false;
};

struct Op {
  std::string name;
  std::vector<Use> uses;
  std::vector<std::pair<std::string, std::size_t>> births;
  std::vector<std::string> deaths; ///< freed after the operator
  std::size_t workspace = 0;
  bool in_place_ok = false;
  double ms = 0; ///< duration with all operands resident
  bool mark = false; ///< a step ends after this operator
};

using Program = std::vector<Op>;

inline OperatorKey key_of(const std::string& name) {
  return std::hash<std::string>{}(name);
}

constexpr double kLinkBytesPerMs = 52e6; // in each direction

class Simulator {
 public:
  struct Counts {
    std::size_t in = 0, out = 0, in_place = 0; ///< bytes
    std::size_t waited = 0; ///< operands for which an operator waited
    std::size_t on_demand = 0; ///< the part of `waited` that no decision had requested
    std::size_t peak = 0;
    std::size_t over = 0; ///< operators that could not run within the budget
    double ms = 0;
  };

  explicit Simulator(const PolicyOptions& options) : options_(options), policy_(options) {}

  Policy& policy() {
    return policy_;
  }
  /// Returns the counts since the last call.
  Counts take_counts() {
    Counts counts = counts_;
    counts.ms = now_ - counted_from_;
    counted_from_ = now_;
    counts_ = {};
    counts_.peak = used_;
    return counts;
  }

  /// Declares a storage that outlives the steps. It begins on the device.
  void declare(const std::string& name, std::size_t bytes) {
    const StorageId id = make(name, bytes);
    policy_.created(id, bytes);
    room_for(bytes);
    take(id, bytes);
  }
  bool is_declared(const std::string& name) const {
    return names_.count(name) != 0;
  }
  StorageId id_of(const std::string& name) const {
    return names_.at(name);
  }
  /// The number of decisions that named the storage since the last call.
  std::size_t decided_for(const std::string& name) {
    return std::exchange(decided_[id_of(name)], 0);
  }
  void die(const std::string& name) {
    const StorageId id = names_.at(name);
    Storage& storage = storages_.at(id);
    if (storage.on_device || storage.fetching) {
      used_ -= storage.bytes;
    }
    retiring_.erase(id);
    policy_.freed(id);
    storages_.erase(id);
    names_.erase(name);
    by_use_.erase(id);
  }

  void run(const Program& program) {
    for (const Op& op : program) {
      run(op);
    }
  }

  void run(const Op& op) {
    accesses_.clear();
    for (const Use& use : op.uses) {
      accesses_.push_back({names_.at(use.name), use.writes});
    }
    ++operators_;
    const Decision& before = policy_.begin(key_of(op.name), accesses_, op.in_place_ok);
    forget_if(before);
    running_.clear();
    for (const Access& access : accesses_) {
      running_.insert(access.storage);
      storages_.at(access.storage).last_use = operators_;
    }
    double link_bound = 0;
    for (const StorageId id : std::set<StorageId>(running_)) {
      link_bound += provide(id, op.in_place_ok);
    }
    for (const Access& access : accesses_) {
      Storage& storage = storages_.at(access.storage);
      if (access.writes && storage.on_device) {
        storage.host_valid = false;
        retiring_.erase(access.storage);
      }
    }
    std::size_t created = op.workspace;
    for (const auto& [name, bytes] : op.births) {
      created += bytes;
    }
    room_for(created);
    std::vector<std::pair<StorageId, std::size_t>> births;
    for (const auto& [name, bytes] : op.births) {
      births.emplace_back(make(name, bytes), bytes);
      take(births.back().first, bytes);
      storages_.at(births.back().first).last_use = operators_;
    }
    counts_.peak = std::max(counts_.peak, used_ + op.workspace);
    held_for_workspace_ = op.workspace;
    advance(now_ + std::max(op.ms, link_bound));
    held_for_workspace_ = 0;
    const Decision& after = policy_.end(births, op.workspace);
    forget_if(after);
    for (const StorageId id : after.retire) {
      CHECK(storages_.count(id) != 0);
      ++decided_[id];
      retire(id);
    }
    for (const StorageId id : after.fetch) {
      CHECK(storages_.count(id) != 0);
      ++decided_[id];
      queue_.push_back(id);
    }
    running_.clear();
    for (const std::string& name : op.deaths) {
      die(name);
    }
    if (op.mark) {
      policy_.mark_step();
    }
    pump();
  }

 private:
  struct Storage {
    std::size_t bytes = 0;
    std::uint64_t last_use = 0; ///< number of the operator; 0: never used
    bool on_device = false;
    bool fetching = false;
    bool host_valid = false; ///< the host has a valid copy, or will have one at time `written`
    double ready = 0; ///< end of the fetch
    double written = 0; ///< end of the write-back
  };

  StorageId make(const std::string& name, std::size_t bytes) {
    CHECK(names_.count(name) == 0);
    const StorageId id = next_id_++;
    names_[name] = id;
    storages_[id] = {bytes, false, false, false, 0, 0};
    return id;
  }
  void take(StorageId id, std::size_t bytes) {
    storages_.at(id).on_device = true;
    used_ += bytes;
    by_use_.insert(id);
  }
  void forget_if(const Decision& decision) {
    if (decision.forget) {
      queue_.clear();
    }
  }
  double transfer_ms(std::size_t bytes) const {
    return static_cast<double>(bytes) / kLinkBytesPerMs;
  }

  /// Advances the time: completes write-backs, and starts fetches for which that makes room.
  void advance(double until) {
    while (true) {
      StorageId first = 0;
      double when = until;
      for (const StorageId id : retiring_) {
        if (storages_.at(id).written <= when) {
          when = storages_.at(id).written;
          first = id;
        }
      }
      if (first == 0) {
        break;
      }
      now_ = std::max(now_, when);
      drop(first);
      pump();
    }
    now_ = std::max(now_, until);
  }

  void drop(StorageId id) {
    Storage& storage = storages_.at(id);
    CHECK(storage.on_device && storage.host_valid);
    storage.on_device = false;
    used_ -= storage.bytes;
    retiring_.erase(id);
    by_use_.erase(id);
  }

  void retire(StorageId id) {
    Storage& storage = storages_.at(id);
    if (!storage.on_device || retiring_.count(id) != 0) {
      return;
    }
    if (!storage.host_valid) {
      link_out_ = std::max(link_out_, now_) + transfer_ms(storage.bytes);
      storage.written = link_out_;
      storage.host_valid = true;
      counts_.out += storage.bytes;
    }
    if (storage.written <= now_ && running_.count(id) == 0) {
      drop(id);
    } else {
      retiring_.insert(id);
    }
  }

  void start_fetch(StorageId id) {
    Storage& storage = storages_.at(id);
    link_in_ = std::max({link_in_, now_, storage.written}) + transfer_ms(storage.bytes);
    storage.fetching = true;
    storage.ready = link_in_;
    used_ += storage.bytes;
    counts_.in += storage.bytes;
    counts_.peak = std::max(counts_.peak, used_ + held_for_workspace_);
  }

  /// Starts the requested fetches in order, while there is room.
  void pump() {
    while (!queue_.empty()) {
      const StorageId id = queue_.front();
      const auto found = storages_.find(id);
      if (found != storages_.end() && retiring_.count(id) != 0) {
        retiring_.erase(id); // requested again before the eviction completed
      } else if (found != storages_.end() && !found->second.on_device && !found->second.fetching) {
        if (used_ + found->second.bytes + held_for_workspace_ > options_.budget) {
          return;
        }
        start_fetch(id);
      }
      queue_.pop_front();
    }
  }

  /// Makes an operand available.
  /// \return the additional milliseconds of the operator if it uses the operand on the host
  double provide(StorageId id, bool in_place_ok) {
    Storage& storage = storages_.at(id);
    if (storage.on_device) {
      retiring_.erase(id);
      return 0;
    }
    if (!storage.fetching) {
      const bool fits = used_of(running_) + storage.bytes <= options_.budget;
      if (in_place_ok && (policy_.use_in_place(id) || !fits)) {
        counts_.in_place += storage.bytes;
        return static_cast<double>(storage.bytes) / 41e6;
      }
      ++counts_.on_demand;
      room_for(storage.bytes);
      start_fetch(id);
    }
    if (storage.ready > now_) {
      ++counts_.waited;
      advance(storage.ready);
    }
    storage.fetching = false;
    storage.on_device = true;
    by_use_.insert(id);
    return 0;
  }

  std::size_t used_of(const std::set<StorageId>& some) const {
    std::size_t sum = 0;
    for (const StorageId id : some) {
      const Storage& storage = storages_.at(id);
      sum += storage.on_device || storage.fetching ? storage.bytes : 0;
    }
    return sum;
  }

  void room_for(std::size_t bytes) {
    while (used_ + bytes > options_.budget) {
      if (!retiring_.empty()) { // wait for the write-back that ends first
        double first = std::numeric_limits<double>::infinity();
        for (const StorageId id : retiring_) {
          if (running_.count(id) == 0) {
            first = std::min(first, storages_.at(id).written);
          }
        }
        if (first < std::numeric_limits<double>::infinity()) {
          const auto queue = std::move(queue_);
          queue_.clear(); // the running operator has priority over fetches ahead
          advance(first);
          queue_ = queue;
          continue;
        }
      }
      StorageId victim = 0;
      std::pair<double, std::uint64_t> worst;
      for (const StorageId id : by_use_) {
        const std::pair<double, std::uint64_t> value{policy_.next_use(id), ~storages_.at(id).last_use};
        if (running_.count(id) == 0 && storages_.at(id).on_device && (victim == 0 || value > worst)) {
          victim = id;
          worst = value;
        }
      }
      if (victim == 0) {
        ++counts_.over;
        return;
      }
      retire(victim);
    }
  }

  PolicyOptions options_;
  Policy policy_;
  Counts counts_;
  std::map<std::string, StorageId> names_;
  std::map<StorageId, Storage> storages_;
  std::set<StorageId> by_use_; ///< those on the device
  std::set<StorageId> retiring_;
  std::set<StorageId> running_;
  std::deque<StorageId> queue_;
  std::map<StorageId, std::size_t> decided_;
  std::vector<Access> accesses_;
  std::uint64_t operators_ = 0;
  std::size_t used_ = 0, held_for_workspace_ = 0;
  double now_ = 0, link_in_ = 0, link_out_ = 0, counted_from_ = 0;
  StorageId next_id_ = 1;
};

} // namespace simulator
