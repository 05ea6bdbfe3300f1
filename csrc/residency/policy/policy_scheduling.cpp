// When a policy makes a schedule: for steps that repeat back to back, and for alternating steps that recur between step
// marks. The rate is limited while schedules turn out useless.
#include <algorithm>
#include <utility>

#include "residency/policy/policy.h"

namespace torch_uvm {

using namespace scheduling;

namespace {

/// Storages that outlive an iteration matter from 1/16 of the budget on. Batches are smaller.
constexpr std::size_t kMatters = 16;
constexpr unsigned kLongestWait = 6; // at most 2^6 iterations between schedules while earlier ones are unproven

} // namespace

void Policy::consider_scheduling() {
  const KnownSchedule* current = matcher_.current();
  if (log_.latest() < next_scheduling_ ||
      (current != nullptr && !current->stale && matcher_.in_a_row() >= 2 * current->schedule.iteration.size())) {
    return;
  }
  for (int tried = 0; tried < 2; ++tried) { // a refused candidate is not proposed again, so the second try sees another
    const std::uint64_t operators = log_.candidate();
    const bool foreseen = current != nullptr && matcher_.in_a_row() >= operators;
    if (operators == 0 || (foreseen && !current->stale)) {
      return;
    }
    if (foreseen && !log_.sizes_repeat(operators)) {
      next_scheduling_ = log_.latest() + operators; // the next iteration may have those of this one
      return;
    }
    if (repeats(operators)) {
      const bool twice = bytes_that_outlive(log_, operators) > options_.budget / kMatters;
      schedule_last(twice ? 2 * operators : operators, operators, next_scheduling_);
      return;
    }
  }
}

bool Policy::repeats(std::uint64_t operators) {
  return log_.repeats(operators, [this](StorageId storage) { return storages_.find(storage) != nullptr; });
}

void Policy::schedule_last(std::uint64_t operators, std::uint64_t period, std::uint64_t& next) {
  next = log_.latest() + (operators << std::min(matcher_.unproven(options_version_), kLongestWait));
  Schedule schedule;
  schedule.iteration = make_iteration(log_, operators, period);
  matcher_.add(std::move(schedule), log_.latest(), storages_);
  solve(*matcher_.current());
  ++counters_.schedules_made;
  catch_up_ = forget_ = true;
}

/// Alternating steps never repeat back to back, so step marks delimit them. Storages created before the previous step
/// count as persistent.
void Policy::end_marked_step() {
  const std::uint64_t end = log_.latest(), operators = end - last_mark_;
  const std::uint64_t persistent = std::exchange(mark_before_, last_mark_);
  last_mark_ = end;
  if (operators == 0 || operators > OperatorLog::kLongestStep || !log_.holds(operators) ||
      matcher_.in_a_row() >= operators) {
    return;
  }
  std::uint64_t hash = operators;
  for (std::uint64_t number = end - operators + 1; number <= end; ++number) {
    hash = mix_bits(hash ^ log_[number].key);
    log_.accesses_of(number, [&](const LoggedAccess& access) {
      hash = mix_bits(hash ^ (access.created_at <= persistent ? 2 * access.storage : access.writes ? 3 : 1));
    });
  }
  const bool known = std::find(marked_.begin(), marked_.end(), hash) != marked_.end();
  if (!known) {
    marked_[next_marked_++ % kMarkedSteps] = hash;
  } else if (end >= next_marked_scheduling_) {
    // Storages that one step passes to the next (gradients, with deferred updates) can be matched only if the previous
    // step was the same.
    const bool repeated = log_.may_repeat(operators) && repeats(operators);
    schedule_last(operators, repeated ? operators : 0, next_marked_scheduling_);
  }
}

void Policy::solve(KnownSchedule& known) {
  PolicyOptions left = options_;
  Iteration& iteration = known.schedule.iteration;
  for (Value& value : iteration.values) {
    value.pinned = false;
  }
  for (const auto& [storage, state] : storages_) {
    if (!state.pinned) {
      continue;
    }
    if (const std::uint32_t* value = iteration.value_of.find(storage)) {
      iteration.values[*value].pinned = true;
    } else {
      left.budget -= std::min(left.budget, state.bytes);
    }
  }
  if (known.untimed == 0) {
    choose_fastest(known.schedule, left);
    catch_up_ = forget_ = true;
  } else {
    known.schedule = make_schedule(std::move(known.schedule.iteration), left);
  }
  known.options = options_version_;
}

} // namespace torch_uvm
