// When a policy makes a schedule: for steps that repeat back to back, and for alternating steps that recur between step
// marks. The rate is limited while schedules turn out useless.
#include <algorithm>
#include <utility>

#include "residency/policy/choose_fastest.h"
#include "residency/policy/policy_state.h"

namespace torch_uvm {

using namespace scheduling;

namespace {

/// Storages that outlive an iteration matter from 1/16 of the budget on. Batches are smaller.
constexpr std::size_t kMatters = 16;
constexpr unsigned kLongestWait = 6; // at most 2^6 iterations between schedules while earlier ones are unproven

} // namespace

void Policy::State::consider_scheduling() {
  const KnownSchedule* current = matcher.current();
  if (log.latest() < next_scheduling ||
      (current != nullptr && !current->stale && matcher.in_a_row() >= 2 * current->schedule.iteration.size())) {
    return;
  }
  for (int tried = 0; tried < 2; ++tried) { // a refused candidate is not proposed again, so the second try sees another
    const std::uint64_t operators = log.candidate();
    const bool foreseen = current != nullptr && matcher.in_a_row() >= operators;
    if (operators == 0 || (foreseen && !current->stale)) {
      return;
    }
    if (foreseen && !log.sizes_repeat(operators)) {
      next_scheduling = log.latest() + operators; // the next iteration may have those of this one
      return;
    }
    if (repeats(operators)) {
      schedule_repeated(operators);
      return;
    }
  }
}

void Policy::State::schedule_repeated(std::uint64_t operators) {
  const bool twice = bytes_that_outlive(log, operators) > options.budget / kMatters;
  schedule_last(twice ? 2 * operators : operators, operators, next_scheduling);
}

bool Policy::State::repeats(std::uint64_t operators) {
  return log.repeats(operators, [this](StorageId storage) { return storages.find(storage) != nullptr; });
}

void Policy::State::schedule_last(std::uint64_t operators, std::uint64_t period, std::uint64_t& next) {
  next = log.latest() + (operators << std::min(matcher.unproven(options_version), kLongestWait));
  Schedule schedule;
  schedule.iteration = make_iteration(log, operators, period);
  matcher.add(std::move(schedule), log.latest(), storages);
  solve(*matcher.current());
  ++counters.schedules_made;
  catch_up = forget = true;
}

/// Alternating steps never repeat back to back, so step marks delimit them. Storages created before the previous step
/// count as persistent.
void Policy::State::end_marked_step() {
  const std::uint64_t end = log.latest(), operators = end - last_mark;
  const std::uint64_t persistent = std::exchange(mark_before, last_mark);
  last_mark = end;
  if (operators == 0 || operators > OperatorLog::kLongestStep || !log.holds(operators) ||
      matcher.in_a_row() >= operators) {
    return;
  }
  std::uint64_t hash = operators;
  for (std::uint64_t number = end - operators + 1; number <= end; ++number) {
    hash = mix_bits(hash ^ log[number].key);
    log.accesses_of(number, [&](const LoggedAccess& access) {
      hash = mix_bits(hash ^ (access.created_at <= persistent ? 2 * access.storage : access.writes ? 3 : 1));
    });
  }
  const bool known = std::find(marked.begin(), marked.end(), hash) != marked.end();
  if (!known) {
    marked[next_marked++ % kMarkedSteps] = hash;
  } else if (end >= next_marked_scheduling) {
    // Storages that one step passes to the next (gradients, with deferred updates) can be matched only if the previous
    // step was the same.
    const bool repeated = log.may_repeat(operators) && repeats(operators);
    schedule_last(operators, repeated ? operators : 0, next_marked_scheduling);
  }
}

void Policy::State::solve(KnownSchedule& known) {
  PolicyOptions left = options;
  Iteration& iteration = known.schedule.iteration;
  for (Value& value : iteration.values) {
    value.pinned = value.on_host = false;
  }
  for (const auto& [storage, state] : storages) {
    if (!state.pinned && !state.on_host) {
      continue;
    }
    if (const std::uint32_t* value = iteration.value_of.find(storage)) {
      iteration.values[*value].pinned = state.pinned;
      iteration.values[*value].on_host = state.on_host;
    } else if (state.pinned) {
      left.budget -= std::min(left.budget, state.bytes);
    }
  }
  if (known.untimed == 0) {
    choose_fastest(known.schedule, left);
    catch_up = forget = true;
  } else {
    known.schedule = make_schedule(std::move(known.schedule.iteration), left);
  }
  known.options = options_version;
}

} // namespace torch_uvm
