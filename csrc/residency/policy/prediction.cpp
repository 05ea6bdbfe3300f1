// How long an iteration takes that follows a schedule.
#include <algorithm>
#include <deque>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "residency/policy/schedule.h"
#include "runtime/link_clock.h"

namespace torch_uvm::scheduling {

namespace {

constexpr int kRounds = 4; // the last one is the steady state
constexpr double kNever = std::numeric_limits<double>::infinity();

class Timeline {
 public:
  Timeline(const Schedule& schedule, const LinkRates& rates, std::size_t capacity)
      : schedule_(schedule),
        iteration_(schedule.iteration),
        rates_(rates),
        link_(rates.into, rates.out, rates.both),
        capacity_(static_cast<double>(capacity)),
        values_(iteration_.values.size()) {
    for (const Use& use : iteration_.uses) {
      values_[use.value].host_valid &= !use.writes;
    }
  }

  double run() {
    double begin = 0;
    for (int round = 0; round < kRounds; ++round) {
      begin = host_ = now_; // the program reads the loss
      for (std::uint32_t op = 0; op < iteration_.size(); ++op) {
        if (!run(op)) {
          return kNever;
        }
      }
      now_ = std::max(now_, host_);
    }
    return now_ - begin;
  }

 private:
  struct State {
    double ready = kNever; ///< when its bytes are on the device; kNever: they are not, and no fetch has begun
    std::uint32_t pending = 0; ///< fetches that have not begun
    bool host_valid = true;
    double written_back = 0; ///< when the latest write-back ends
  };

  double bytes(std::uint32_t value) const {
    return static_cast<double>(iteration_.values[value].bytes);
  }
  bool is_resident(std::uint32_t value) const {
    return values_[value].ready != kNever;
  }

  bool run(std::uint32_t op) {
    host_ += static_cast<double>(iteration_.ops[op].host_ms);
    now_ = std::max(now_, host_);
    while (start_fetch(now_)) {
    }
    double start = now_, read = 0, written = 0, made = 0;
    for (std::uint32_t use = iteration_.use_begin[op]; use < iteration_.use_begin[op + 1]; ++use) {
      const Use& it = iteration_.uses[use];
      State& value = values_[it.value];
      if (iteration_.values[it.value].pinned) {
        continue;
      }
      if (schedule_.in_place[use]) {
        read += bytes(it.value);
        written += it.writes && it.next != kNone ? bytes(it.value) : 0; // an optimizer scales no gradient
        continue;
      }
      if (it.is_creation || (!is_resident(it.value) && value.pending == 0)) {
        made += is_resident(it.value) ? 0 : bytes(it.value); // what is made again takes its own place
      } else {
        while (!is_resident(it.value)) {
          if (!start_fetch(kNever)) {
            return false;
          }
        }
        start = std::max(start, value.ready);
      }
      value.host_valid &= !it.writes;
    }
    const double begin = take(made, start, kNever);
    if (begin == kNever) {
      return false;
    }
    const auto ms = static_cast<double>(iteration_.ops[op].ms);
    const double beside = beside_copies(LinkClock::kToDevice, begin, ms) + beside_copies(LinkClock::kToHost, begin, ms);
    link_.occupy(LinkClock::kToDevice, begin, read / rates_.in_place); // copies wait
    link_.occupy(LinkClock::kToHost, begin, written / rates_.in_place);
    now_ = begin + std::max(ms + rates_.slowed * beside, read / rates_.in_place);
    for (std::uint32_t use = iteration_.use_begin[op]; use < iteration_.use_begin[op + 1]; ++use) {
      State& value = values_[iteration_.uses[use].value];
      if (!schedule_.in_place[use] && value.ready == kNever && !iteration_.values[iteration_.uses[use].value].pinned) {
        value.ready = begin;
      }
    }
    if (iteration_.ops[op].waits) {
      host_ = std::max(host_, now_);
    }
    for (const std::uint32_t value : iteration_.frees[op]) {
      leave(value, now_);
    }
    for (const std::uint32_t value : schedule_.write_back[op]) {
      write_back(value);
    }
    for (const std::uint32_t value : schedule_.retire[op]) {
      write_back(value);
      leave(value, std::max(now_, values_[value].written_back));
    }
    for (const std::uint32_t value : schedule_.fetch[op]) {
      pending_.emplace_back(value, now_);
      ++values_[value].pending;
    }
    return true;
  }

  /// How much of an operator runs beside copies that are queued by then.
  double beside_copies(LinkClock::Direction direction, double begin, double ms) const {
    return std::clamp(link_.free_at(direction) - begin, 0.0, ms);
  }

  void write_back(std::uint32_t value) {
    if (is_resident(value) && !values_[value].host_valid) {
      values_[value].written_back = link_.copy(LinkClock::kToHost, now_, bytes(value));
      host_ += rates_.host_ms;
      values_[value].host_valid = true;
    }
  }

  void leave(std::uint32_t value, double time) {
    if (is_resident(value)) {
      values_[value].ready = kNever;
      frees_.emplace(time, bytes(value));
    }
  }

  /// Starts the first pending fetch. \return false: there is none, or no room for it by then
  bool start_fetch(double until) {
    if (pending_.empty()) {
      return false;
    }
    const auto [value, issued] = pending_.front();
    if (!is_resident(value)) {
      const double begin = take(bytes(value), std::max(issued, link_.free_at(LinkClock::kToDevice)), until);
      if (begin == kNever) {
        return false;
      }
      values_[value].ready = link_.copy(LinkClock::kToDevice, begin, bytes(value));
      host_ += rates_.host_ms;
    }
    --values_[value].pending;
    pending_.pop_front();
    return true;
  }

  /// When there is room, from `at` on; kNever: not by `until`.
  double take(double amount, double at, double until) {
    while (!frees_.empty() && used_ + amount > capacity_ && frees_.top().first <= until) {
      freed_until_ = frees_.top().first;
      used_ -= frees_.top().second;
      frees_.pop();
    }
    if (used_ + amount > capacity_) {
      return kNever;
    }
    used_ += amount;
    return std::max(at, freed_until_);
  }

  using Free = std::pair<double, double>; ///< time and bytes

  const Schedule& schedule_;
  const Iteration& iteration_;
  const LinkRates rates_;
  LinkClock link_;
  const double capacity_;
  std::vector<State> values_;
  std::deque<std::pair<std::uint32_t, double>> pending_; ///< values to fetch, and when that was issued
  std::priority_queue<Free, std::vector<Free>, std::greater<>> frees_;
  double used_ = 0;
  double freed_until_ = 0; ///< `used_` is without what was freed by then
  double now_ = 0;
  double host_ = 0; ///< when the host has queued all before
};

} // namespace

double predict_ms(const Schedule& schedule, const LinkRates& rates, std::size_t capacity) {
  return Timeline(schedule, rates, capacity).run();
}

} // namespace torch_uvm::scheduling
