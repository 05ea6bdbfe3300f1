#include <algorithm>
#include <queue>
#include <tuple>

#include "residency/plan.h"

namespace torch_uvm::planning {

namespace {

constexpr int kLaps = 3; // the first is unlike the others, the second is kept, the third tells how it ends
/// What is clean leaves for half the traffic: it is preferred unless it is needed this much sooner.
constexpr double kCleanIsWorth = 1.5;

class Belady {
 public:
  Belady(const Lap& lap, const PolicyOptions& options, std::size_t capacity)
      : lap_(lap), options_(options), capacity_(capacity), parts_(lap.parts.size()) {
    for (int at = 0; at < kLaps; ++at) {
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
        move_in(part, lap_.events[events.front()].op, rank(events.back()));
      }
    }
    for (lap_number_ = 0; lap_number_ < kLaps; ++lap_number_) {
      for (std::uint32_t op = 0; op < lap_.size(); ++op) {
        run_operator(op);
      }
    }
  }

  void result(Plan& plan) const {
    plan.leaves = leaves_[1];
    plan.in_place.assign(lap_.events.size(), false);
    for (std::uint32_t event = 0; event < lap_.events.size(); ++event) {
      const Event& it = lap_.events[event];
      if (it.next != kNone && plan.leaves[event]) {
        const bool wraps = lap_.events[it.next].op <= it.op;
        plan.in_place[it.next] = in_place_[wraps ? 2 : 1][it.next];
      }
    }
  }

 private:
  struct State {
    bool alive = false;
    bool resident = false;
    bool dirty = true; ///< the host has not these bytes
    int lap = 0; ///< of the latest event
    std::uint32_t latest = 0; ///< event
    std::uint32_t entry = 0; ///< counts, so that old entries of a queue are known
    std::uint64_t used_at = 0; ///< the operator that must not lose it
  };
  struct Entry {
    std::uint64_t next = 0; ///< operator at which it is needed, or dies
    std::uint32_t in_place = 0; ///< of those that are needed together the larger leaves first
    std::uint32_t part = 0;
    std::uint32_t entry = 0;
    friend bool operator<(const Entry& left, const Entry& right) {
      return std::tie(left.next, left.in_place, left.part) < std::tie(right.next, right.in_place, right.part);
    }
  };

  std::uint64_t now(std::uint32_t op) const {
    return static_cast<std::uint64_t>(lap_number_) * lap_.size() + op + 1;
  }

  /// 2: its next use will be in place, and is the only one in a lap; 1: in place, and the last; 0: neither.
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

  /// The entry that would leave first, with what runs now left aside; nullptr: none.
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
        continue; // the first lap begins in the middle of some lives
      }
      state.used_at = now;
      if (it.birth) {
        if (state.resident) {
          move_out(it.part); // one of the lap before that does not die
        }
        need += lap_.parts[it.part].bytes;
      } else if (!state.resident) {
        in_place_[lap_number_][event] = better_in_place(event);
        need += in_place_[lap_number_][event] ? 0 : lap_.parts[it.part].bytes;
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
    for (const std::uint32_t part : lap_.deaths[op]) {
      if (parts_[part].resident) {
        move_out(part);
      }
      parts_[part].alive = false;
    }
  }

  /// A fetch that serves one use only crosses the link for nothing more than the use itself does.
  bool better_in_place(std::uint32_t event) const {
    const Event& it = lap_.events[event];
    if (!options_.in_place || !lap_.ops[it.op].in_place_ok) {
      return false;
    }
    const bool only_use = it.next == kNone || it.next == event;
    return only_use || (lap_number_ > 0 && leaves_[lap_number_ - 1][event]);
  }

  std::size_t use_the_rest_in_place(std::uint32_t first, std::uint32_t end, std::size_t excess) {
    std::size_t saved = 0;
    for (std::uint32_t event = first; event < end && saved < excess; ++event) {
      const Event& it = lap_.events[event];
      if (!it.birth && parts_[it.part].alive && !parts_[it.part].resident && !in_place_[lap_number_][event]) {
        in_place_[lap_number_][event] = true;
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
    state.lap = lap_number_;
    if (in_place_[lap_number_][event]) {
      leaves_[lap_number_][event] = true; // it stays on the host
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
  std::vector<State> parts_;
  std::priority_queue<Entry> queues_[2]; ///< clean, dirty
  std::vector<Entry> aside_;
  std::vector<bool> leaves_[kLaps];
  std::vector<bool> in_place_[kLaps];
};

} // namespace

void choose_what_leaves(Plan& plan, const PolicyOptions& options, std::size_t capacity) {
  Belady belady(plan.lap, options, capacity);
  belady.run();
  belady.result(plan);
}

} // namespace torch_uvm::planning
