#include "residency/engine/loops.h"

#include <algorithm>
#include <utility>

namespace torch_uvm {
namespace {

constexpr std::uint64_t kShared = 4096; // number of operators for which shares of the budget stand
constexpr std::size_t kNearlyEqual = 16; // a share that differs by less than 1/16 makes no new schedules

} // namespace

std::unique_ptr<Loops::Loop> Loops::make() const {
  auto loop = std::make_unique<Loop>();
  loop->policy.set_options(options_);
  loop->budget = options_.budget;
  return loop;
}

void Loops::start() {
  if (empty()) {
    loops_.push_back(make());
  }
}

void Loops::set_options(const PolicyOptions& options) {
  options_ = options;
  for (const auto& loop : loops_) {
    loop->policy.set_options(options);
    loop->budget = options.budget;
    loop->operators = loop->policy.operators(); // what ran within another budget has no share in this one
    loop->policy.take_peak_bytes();
  }
  next_share_ = 0;
}

bool Loops::is_free(std::size_t loop) const {
  return loop != kUnknown && std::ranges::find(runners_, loop, &Runner::loop) == runners_.end();
}

std::size_t Loops::of_thread(const Thread& thread, std::size_t used, bool shared) {
  const auto known = std::ranges::find(runners_, thread.get(), &Runner::address);
  if (known != runners_.end()) {
    return known->loop;
  }
  std::erase_if(runners_, [](const Runner& runner) { return runner.thread.expired(); });
  std::size_t loop = used;
  for (std::size_t other = 0; !shared && !is_free(loop); ++other) {
    while (other >= size()) {
      loops_.push_back(make());
    }
    loop = other;
  }
  runners_.push_back({thread, thread.get(), loop});
  return loop;
}

std::size_t Loops::unknown() const {
  std::size_t only = size() == 1 ? 0 : kUnknown;
  for (const Runner& runner : runners_) {
    if (!runner.thread.expired() && runner.loop != only) {
      if (only != kUnknown) {
        return kUnknown;
      }
      only = runner.loop;
    }
  }
  return only;
}

void Loops::join(std::size_t from, std::size_t to) {
  for (Runner& runner : runners_) {
    runner.loop = runner.loop == from ? to : runner.loop;
  }
  joined_.plan_hits += loops_[from]->policy.counters().plan_hits;
  joined_.plan_misses += loops_[from]->policy.counters().plan_misses;
  loops_[from] = make(); // its storages follow as they are used
}

void Loops::share_budget(std::uint64_t now) {
  if (size() == 1 || now < next_share_) {
    return;
  }
  next_share_ = now + std::max(kShared, 2 * step_length()); // each peak is of whole steps
  std::vector<double> needs;
  double all = 0;
  for (const auto& loop : loops_) {
    const std::uint64_t before = std::exchange(loop->operators, loop->policy.operators());
    // Others soon use what operators without a loop have made, so it would count twice.
    const bool runs = before != loop->operators && loop != loops_[kUnknown];
    const auto peak = static_cast<double>(loop->policy.take_peak_bytes());
    needs.push_back(runs ? peak : 0);
    if (!runs) {
      loop->policy.stop();
    }
    all += needs.back();
  }
  for (std::size_t index = 0; index < loops_.size(); ++index) {
    Loop& loop = *loops_[index];
    const double share = all > static_cast<double>(options_.budget) ? needs[index] / all : 1;
    PolicyOptions own = options_;
    own.budget = static_cast<std::size_t>(share * static_cast<double>(options_.budget));
    own.reserve = static_cast<std::size_t>(share * static_cast<double>(options_.reserve));
    const std::size_t change = std::max(own.budget, loop.budget) - std::min(own.budget, loop.budget);
    if (needs[index] != 0 && change > loop.budget / kNearlyEqual) {
      loop.policy.set_options(own);
      loop.budget = own.budget;
    }
  }
}

std::uint64_t Loops::step_length() const {
  std::uint64_t all = 0;
  for (const auto& loop : loops_) {
    all += loop->policy.step_length();
  }
  return all;
}

std::uint64_t Loops::sum(std::uint64_t Policy::Counters::* counter) const {
  std::uint64_t all = joined_.*counter;
  for (const auto& loop : loops_) {
    all += loop->policy.counters().*counter;
  }
  return all;
}

} // namespace torch_uvm
