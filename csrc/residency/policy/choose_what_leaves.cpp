#include <algorithm>
#include <queue>
#include <tuple>

#include "residency/policy/plan.h"

namespace torch_uvm::planning {

namespace {

// Iteration 0 starts with everything resident and is not representative, so we keep the evictions of iteration 1.
// Belady's choice can oscillate between iterations; simulate further (at most 8) until no new eviction is needed.
constexpr int kGood = 2; // index of the result: iteration 2 and later add to the evictions of iteration 1
constexpr int kMostLaps = 8;
/// Evicting a clean value causes half the traffic. Prefer it unless a dirty value's next use is this much farther away.
constexpr double kCleanIsWorth = 1.5;

class Belady {
 public:
  Belady(const Lap& lap, const PolicyOptions& options, std::size_t capacity)
      : lap_(lap), options_(options), capacity_(capacity), parts_(lap.parts.size()) {
    for (int at = 0; at <= kGood; ++at) {
      leaves_[at].assign(lap.events.size(), false);
      in_place_[at].assign(lap.events.size(), false);
    }
  }

  void run() {
    for (std::uint32_t part = 0; part < parts_.size(); ++part) {
      const Part& it = lap_.parts[part];
      if (it.birth == kNone && !it.held) {
        const std::vector<std::uint32_t>& events = lap_.events_of[part];
        parts_[part].latest = events.back();
        parts_[part].alive = true;
        // A value that the step only reads is written back at most once in total, so it counts as clean.
        parts_[part].dirty =
            std::any_of(events.begin(), events.end(), [&](std::uint32_t event) { return lap_.events[event].writes; });
        move_in(part, lap_.events[events.front()].op, rank(events.back()));
      }
    }
    for (lap_number_ = 0; lap_number_ < kMostLaps && (lap_number_ <= kGood || more_leaves_); ++lap_number_) {
      stage_ = std::min(lap_number_, kGood);
      if (lap_number_ == kGood) {
        leaves_[kGood] = leaves_[kGood - 1];
      }
      more_leaves_ = false;
      for (std::uint32_t op = 0; op < lap_.size(); ++op) {
        run_operator(op);
      }
    }
  }

  void result(Plan& plan) const {
    plan.leaves = leaves_[kGood];
    plan.in_place = in_place_[kGood];
  }

 private:
  struct State {
    bool alive = false;
    bool resident = false;
    bool dirty = true; ///< the host has no valid copy
    int lap = 0; ///< stage of the latest use
    std::uint32_t latest = 0; ///< the latest use (event)
    std::uint32_t entry = 0; ///< version of its queue entry; older entries are stale
    std::uint64_t used_at = 0; ///< the latest operator that uses it; not evicted during that operator
  };
  struct Entry {
    std::uint64_t next = 0; ///< operator of its next use, or at which it is freed
    std::uint32_t in_place = 0; ///< see `rank`; breaks ties of `next`: the higher rank is evicted first
    std::uint32_t part = 0;
    std::uint32_t entry = 0;
    friend bool operator<(const Entry& left, const Entry& right) {
      return std::tie(left.next, left.in_place, left.part) < std::tie(right.next, right.in_place, right.part);
    }
  };

  std::uint64_t now(std::uint32_t op) const {
    return static_cast<std::uint64_t>(lap_number_) * lap_.size() + op + 1;
  }

  /// 2: the next use can be in place and is the only one in an iteration; 1: in place and the last one; 0: otherwise.
  std::uint32_t rank(std::uint32_t event) const {
    const std::uint32_t next = lap_.events[event].next;
    if (next == kNone || !options_.in_place || !lap_.ops[lap_.events[next].op].in_place_ok) {
      return 0;
    }
    return next == event ? 2 : lap_.events[next].next == kNone ? 1 : 0;
  }

  void move_in(std::uint32_t part, std::uint64_t next, std::uint32_t rank) {
    State& state = parts_[part];
    if (!state.resident) {
      state.resident = true;
      used_ += lap_.parts[part].bytes;
    }
    queues_[state.dirty ? 1 : 0].push({next, rank, part, ++state.entry});
  }

  void move_out(std::uint32_t part) {
    State& state = parts_[part];
    state.resident = false;
    ++state.entry;
    used_ -= lap_.parts[part].bytes;
  }

  /// The first entry to evict, apart from values that the current operator uses; nullptr: none.
  const Entry* top(std::priority_queue<Entry>& queue, std::uint64_t now) {
    while (!queue.empty()) {
      const Entry& entry = queue.top();
      if (entry.entry == parts_[entry.part].entry) {
        if (parts_[entry.part].used_at != now) {
          return &entry;
        }
        aside_.push_back(entry);
      }
      queue.pop();
    }
    return nullptr;
  }

  bool evict_one(std::uint64_t now) {
    const Entry* clean = top(queues_[0], now);
    const Entry* dirty = top(queues_[1], now);
    if (clean == nullptr && dirty == nullptr) {
      return false;
    }
    bool take_clean = clean != nullptr;
    if (clean != nullptr && dirty != nullptr) {
      take_clean = static_cast<double>(clean->next - now) * kCleanIsWorth >= static_cast<double>(dirty->next - now);
    }
    const std::uint32_t part = (take_clean ? clean : dirty)->part;
    State& state = parts_[part];
    move_out(part);
    state.dirty = false;
    leaves_[state.lap][state.latest] = true;
    leaves_[stage_][state.latest] = true;
    more_leaves_ = true;
    return true;
  }

  void run_operator(std::uint32_t op) {
    const std::uint64_t now = this->now(op);
    const std::uint32_t first = lap_.event_begin[op], end = lap_.event_begin[op + 1];
    std::size_t need = lap_.ops[op].workspace;
    for (std::uint32_t event = first; event < end; ++event) {
      const Event& it = lap_.events[event];
      State& state = parts_[it.part];
      if (lap_.parts[it.part].held || (!it.birth && !state.alive)) {
        continue; // iteration 0 has no temporaries of an iteration before it
      }
      state.used_at = now;
      if (it.birth) {
        if (state.resident) {
          move_out(it.part); // the previous iteration's storage, which is never freed
        }
        need += lap_.parts[it.part].bytes;
      } else if (!state.resident) {
        in_place_[stage_][event] = better_in_place(event);
        need += in_place_[stage_][event] ? 0 : lap_.parts[it.part].bytes;
      }
    }
    while (used_ + need > capacity_ && evict_one(now)) {
    }
    if (used_ + need > capacity_ && options_.in_place && lap_.ops[op].in_place_ok) {
      need -= use_the_rest_in_place(first, end, used_ + need - capacity_);
    }
    for (std::uint32_t event = first; event < end; ++event) {
      happen(event, now);
    }
    for (const Entry& entry : aside_) {
      if (entry.entry == parts_[entry.part].entry) {
        queues_[parts_[entry.part].dirty ? 1 : 0].push(entry);
      }
    }
    aside_.clear();
    for (std::uint32_t event = first; stage_ == kGood && event < end; ++event) {
      State& state = parts_[lap_.events[event].part];
      if (leaves_[kGood][event] && state.resident && state.latest == event) {
        move_out(lap_.events[event].part);
        state.dirty = false;
      }
    }
    for (const std::uint32_t part : lap_.deaths[op]) {
      if (parts_[part].resident) {
        move_out(part);
      }
      parts_[part].alive = false;
    }
  }

  /// A fetch for a single use moves no fewer bytes across the link than the use in place.
  bool better_in_place(std::uint32_t event) const {
    const Event& it = lap_.events[event];
    if (!options_.in_place || !lap_.ops[it.op].in_place_ok) {
      return false;
    }
    const bool only_use = it.next == kNone || it.next == event;
    return only_use || (stage_ > 0 && leaves_[stage_ < kGood ? stage_ - 1 : kGood][event]);
  }

  std::size_t use_the_rest_in_place(std::uint32_t first, std::uint32_t end, std::size_t excess) {
    std::size_t saved = 0;
    for (std::uint32_t event = first; event < end && saved < excess; ++event) {
      const Event& it = lap_.events[event];
      if (!it.birth && parts_[it.part].alive && !parts_[it.part].resident && !in_place_[stage_][event]) {
        in_place_[stage_][event] = true;
        saved += lap_.parts[it.part].bytes;
      }
    }
    return saved;
  }

  void happen(std::uint32_t event, std::uint64_t now) {
    const Event& it = lap_.events[event];
    State& state = parts_[it.part];
    if (lap_.parts[it.part].held || (!it.birth && !state.alive)) {
      return;
    }
    state.alive = true;
    state.latest = event;
    state.lap = stage_;
    if (in_place_[stage_][event]) {
      leaves_[stage_][event] = true; // it stays on the host
      return;
    }
    state.dirty = it.writes || (state.resident && state.dirty);
    move_in(it.part, it.distance == kNone ? ~std::uint64_t{0} >> 1 : now + it.distance, rank(event));
  }

  const Lap& lap_;
  const PolicyOptions& options_;
  std::size_t capacity_;
  std::size_t used_ = 0;
  int lap_number_ = 0;
  int stage_ = 0; ///< lap_number_, at most kGood: index into leaves_ and in_place_
  bool more_leaves_ = false;
  std::vector<State> parts_;
  std::priority_queue<Entry> queues_[2]; ///< clean, dirty
  std::vector<Entry> aside_;
  std::vector<bool> leaves_[kGood + 1];
  std::vector<bool> in_place_[kGood + 1];
};

} // namespace

void choose_what_leaves(Plan& plan, const PolicyOptions& options, std::size_t capacity) {
  Belady belady(plan.lap, options, capacity);
  belady.run();
  belady.result(plan);
}

} // namespace torch_uvm::planning
