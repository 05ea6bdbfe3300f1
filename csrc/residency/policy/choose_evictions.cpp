#include <algorithm>
#include <queue>
#include <tuple>

#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

namespace {

// Iteration 0 starts with all values resident, so its evictions are not the steady state's. The result starts from the
// evictions of iteration 1. Later iterations repeat them and may add some. The simulation ends after iteration 2 or
// later, once one adds none.
constexpr int kGood = 2; // index of the result: iteration 2 and later add to the evictions of iteration 1
constexpr int kMaxIterations = 8;

class Belady {
 public:
  Belady(const Iteration& iteration, const PolicyOptions& options, std::size_t capacity)
      : iteration_(iteration), options_(options), capacity_(capacity), values_(iteration.values.size()) {
    for (int at = 0; at <= kGood; ++at) {
      leaves_[at].assign(iteration.uses.size(), false);
      in_place_[at].assign(iteration.uses.size(), false);
    }
  }

  /// Sets the schedule's evictions and uses in place.
  void run(Schedule& schedule) {
    for (std::uint32_t value = 0; value < values_.size(); ++value) {
      const Value& it = iteration_.values[value];
      if (it.created_at == kNone && !it.pinned) {
        const std::vector<std::uint32_t>& uses = iteration_.uses_of[value];
        values_[value].latest = uses.back();
        values_[value].alive = true;
        move_in(value, iteration_.uses[uses.front()].op, rank(uses.back()));
      }
    }
    for (iteration_number_ = 0; iteration_number_ < kMaxIterations && (iteration_number_ <= kGood || more_evictions_);
         ++iteration_number_) {
      stage_ = std::min(iteration_number_, kGood);
      if (iteration_number_ == kGood) {
        leaves_[kGood] = leaves_[kGood - 1];
      }
      more_evictions_ = false;
      for (std::uint32_t op = 0; op < iteration_.size(); ++op) {
        run_operator(op);
      }
    }
    schedule.evicted_after = leaves_[kGood];
    schedule.in_place = in_place_[kGood];
  }

 private:
  struct State {
    bool alive = false;
    bool resident = false;
    int iteration = 0; ///< stage of the latest use
    std::uint32_t latest = 0; ///< the latest use
    std::uint32_t entry = 0; ///< version of its queue entry; older entries are stale
    std::uint64_t used_at = 0; ///< the latest operator that uses it; not evicted during that operator
  };
  struct Entry {
    std::uint64_t next = 0; ///< operator of its next use, or at which it is freed
    std::uint32_t in_place = 0; ///< see `rank`; breaks ties of `next`: the higher rank is evicted first
    std::uint32_t value = 0;
    std::uint32_t entry = 0;
    friend bool operator<(const Entry& left, const Entry& right) {
      return std::tie(left.next, left.in_place, left.value) < std::tie(right.next, right.in_place, right.value);
    }
  };

  std::uint64_t now(std::uint32_t op) const {
    return static_cast<std::uint64_t>(iteration_number_) * iteration_.size() + op + 1;
  }

  /// 2: the next use can be in place, and the uses around it are equally far; 1: in place and the last one; 0:
  /// otherwise.
  std::uint32_t rank(std::uint32_t use) const {
    const std::uint32_t next = iteration_.uses[use].next;
    if (next == kNone || !options_.in_place || !iteration_.ops[iteration_.uses[next].op].in_place_ok) {
      return 0;
    }
    return iteration_.uses[next].distance == iteration_.uses[use].distance ? 2
           : iteration_.uses[next].next == kNone                           ? 1
                                                                           : 0;
  }

  void move_in(std::uint32_t value, std::uint64_t next, std::uint32_t rank) {
    State& state = values_[value];
    if (!state.resident) {
      state.resident = true;
      used_ += iteration_.values[value].bytes;
    }
    queue_.push({next, rank, value, ++state.entry});
  }

  void move_out(std::uint32_t value) {
    State& state = values_[value];
    state.resident = false;
    ++state.entry;
    used_ -= iteration_.values[value].bytes;
  }

  /// The first entry to evict, apart from values that the current operator uses; nullptr: none.
  const Entry* top(std::uint64_t now) {
    while (!queue_.empty()) {
      const Entry& entry = queue_.top();
      if (entry.entry == values_[entry.value].entry) {
        if (values_[entry.value].used_at != now) {
          return &entry;
        }
        aside_.push_back(entry);
      }
      queue_.pop();
    }
    return nullptr;
  }

  bool evict_one(std::uint64_t now) {
    const Entry* const first = top(now);
    if (first == nullptr) {
      return false;
    }
    const std::uint32_t value = first->value;
    move_out(value);
    leave_after_latest(values_[value]);
    return true;
  }

  void run_operator(std::uint32_t op) {
    const std::uint64_t now = this->now(op);
    const std::uint32_t first = iteration_.use_begin[op], end = iteration_.use_begin[op + 1];
    std::size_t need = iteration_.ops[op].workspace;
    for (std::uint32_t use = first; use < end; ++use) {
      const Use& it = iteration_.uses[use];
      State& state = values_[it.value];
      if (iteration_.values[it.value].pinned || (!it.is_creation && !state.alive)) {
        continue; // iteration 0 has no temporaries of an iteration before it
      }
      state.used_at = now;
      if (it.is_creation) {
        if (state.resident) {
          move_out(it.value); // the previous iteration's storage, which is never freed
        }
        need += iteration_.values[it.value].bytes;
      } else if (!state.resident) {
        in_place_[stage_][use] = choose_in_place(use);
        need += in_place_[stage_][use] ? 0 : iteration_.values[it.value].bytes;
      }
    }
    while (used_ + need > capacity_ && evict_one(now)) {
    }
    if (used_ + need > capacity_ && options_.in_place && iteration_.ops[op].in_place_ok) {
      need -= use_the_rest_in_place(first, end, used_ + need - capacity_);
      for (std::uint32_t use = first; use < end && used_ + need > capacity_; ++use) {
        evict_operand(use);
      }
    }
    for (std::uint32_t use = first; use < end; ++use) {
      happen(use, now);
    }
    for (const Entry& entry : aside_) {
      if (entry.entry == values_[entry.value].entry) {
        queue_.push(entry);
      }
    }
    aside_.clear();
    for (std::uint32_t use = first; stage_ == kGood && use < end; ++use) {
      State& state = values_[iteration_.uses[use].value];
      if (leaves_[kGood][use] && state.resident && state.latest == use) {
        move_out(iteration_.uses[use].value);
      }
    }
    for (const std::uint32_t value : iteration_.frees[op]) {
      if (iteration_.values[value].created_at == op && iteration_.uses[values_[value].latest].distance > 0) {
        continue; // the previous iteration's was freed: a batch goes once the next one is made
      }
      if (values_[value].resident) {
        move_out(value);
      }
      values_[value].alive = false;
    }
  }

  /// A value that was evicted since its latest use is evicted again before the next one if that is as far. Its fetch
  /// moves no fewer bytes across the link than the use in place.
  bool choose_in_place(std::uint32_t use) const {
    const Use& it = iteration_.uses[use];
    if (!options_.in_place || !iteration_.ops[it.op].in_place_ok) {
      return false;
    }
    const bool evicted_again = it.next == kNone || it.distance == iteration_.uses[values_[it.value].latest].distance;
    return evicted_again || (stage_ > 0 && leaves_[stage_ < kGood ? stage_ - 1 : kGood][use]);
  }

  std::size_t use_the_rest_in_place(std::uint32_t first, std::uint32_t end, std::size_t excess) {
    std::size_t saved = 0;
    for (std::uint32_t use = first; use < end && saved < excess; ++use) {
      const Use& it = iteration_.uses[use];
      if (!it.is_creation && values_[it.value].alive && !values_[it.value].resident && !in_place_[stage_][use]) {
        in_place_[stage_][use] = true;
        saved += iteration_.values[it.value].bytes;
      }
    }
    return saved;
  }

  /// Evicts a resident operand after its latest use, and uses the host's copy. Lists of tensors may be as large as the
  /// budget: the results of `_foreach_sqrt` beside its operands.
  void evict_operand(std::uint32_t use) {
    const Use& it = iteration_.uses[use];
    State& state = values_[it.value];
    if (it.is_creation || !state.resident) {
      return;
    }
    move_out(it.value);
    leave_after_latest(state);
    in_place_[stage_][use] = true;
  }

  void leave_after_latest(State& state) {
    leaves_[state.iteration][state.latest] = true;
    leaves_[stage_][state.latest] = true;
    more_evictions_ = true;
  }

  void happen(std::uint32_t use, std::uint64_t now) {
    const Use& it = iteration_.uses[use];
    State& state = values_[it.value];
    if (iteration_.values[it.value].pinned || (!it.is_creation && !state.alive)) {
      return;
    }
    state.alive = true;
    state.latest = use;
    state.iteration = stage_;
    if (in_place_[stage_][use]) {
      leaves_[stage_][use] = true; // it stays on the host
      return;
    }
    move_in(it.value, it.distance == kNone ? ~std::uint64_t{0} >> 1 : now + it.distance, rank(use));
  }

  const Iteration& iteration_;
  const PolicyOptions& options_;
  std::size_t capacity_;
  std::size_t used_ = 0;
  int iteration_number_ = 0;
  int stage_ = 0; ///< iteration_number_, at most kGood: index into leaves_ and in_place_
  bool more_evictions_ = false;
  std::vector<State> values_;
  std::priority_queue<Entry> queue_;
  std::vector<Entry> aside_;
  std::vector<bool> leaves_[kGood + 1];
  std::vector<bool> in_place_[kGood + 1];
};

} // namespace

void choose_evictions(Schedule& schedule, const PolicyOptions& options, std::size_t capacity) {
  Belady(schedule.iteration, options, capacity).run(schedule);
}

} // namespace torch_uvm::scheduling
