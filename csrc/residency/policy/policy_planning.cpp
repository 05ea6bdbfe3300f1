// When a policy plans: steps that repeat, or that take turns between marks; and never without end.
#include <algorithm>
#include <utility>

#include "residency/policy/policy_state.h"

namespace torch_uvm {

using namespace planning;

namespace {

constexpr unsigned kLongestWait = 6; // powers of two laps between plans while others have not proved themselves

} // namespace

void Policy::State::consider_planning() {
  const KnownPlan* current = follower.current();
  if (log.latest() < next_planning ||
      (current != nullptr && !current->stale && follower.in_a_row() >= 2 * current->plan.lap.size())) {
    return;
  }
  for (int tried = 0; tried < 2; ++tried) { // one that is refused is not proposed again at once
    const std::uint64_t operators = log.candidate();
    const bool foreseen = current != nullptr && follower.in_a_row() >= operators;
    if (operators == 0 || (foreseen && !(current->stale && log.sizes_repeat(operators)))) {
      return;
    }
    if (repeats(operators)) {
      plan_last(operators, true);
      return;
    }
  }
}

bool Policy::State::repeats(std::uint64_t operators) {
  return log.repeats(operators, [this](StorageId storage) { return storages.find(storage) != nullptr; });
}

void Policy::State::plan_last(std::uint64_t operators, bool repeated) {
  next_planning = log.latest() + (operators << std::min(follower.unproved(), kLongestWait));
  Plan plan;
  plan.lap = make_lap(log, operators, repeated);
  follower.add(std::move(plan), log.latest(), storages);
  solve(*follower.current());
  ++counters.plans_made;
  catch_up = forget = true;
}

/// Steps that take turns never follow themselves; the marks between them tell where they begin. What was born before
/// the step before this one is taken for persistent.
void Policy::State::end_marked_step() {
  const std::uint64_t end = log.latest(), operators = end - last_mark;
  const std::uint64_t persistent = std::exchange(mark_before, last_mark);
  last_mark = end;
  if (operators == 0 || operators > OperatorLog::kLongestStep || follower.in_a_row() >= operators) {
    return;
  }
  std::uint64_t hash = operators;
  for (std::uint64_t number = end - operators + 1; number <= end; ++number) {
    hash = mix_bits(hash ^ log[number].key);
    log.accesses_of(number, [&](const LoggedAccess& access) {
      hash = mix_bits(hash ^ (access.birth <= persistent ? 2 * access.storage : access.writes ? 3 : 1));
    });
  }
  const bool known = std::find(marked.begin(), marked.end(), hash) != marked.end();
  if (!known) {
    marked[next_marked++ % kMarkedSteps] = hash;
  } else if (end >= next_planning) {
    // What one step leaves to the next (gradients, where updates are deferred) is told only where it is the same step.
    plan_last(operators, log.may_repeat(operators) && repeats(operators));
  }
}

void Policy::State::solve(KnownPlan& known) {
  PolicyOptions left = options;
  Lap& lap = known.plan.lap;
  for (Part& part : lap.parts) {
    part.held = false;
  }
  storages.for_each([&](StorageId storage, const StorageState& state) {
    if (!state.held) {
      return;
    }
    if (const std::uint32_t* part = lap.part_of.find(storage)) {
      lap.parts[*part].held = true;
    } else {
      left.budget -= std::min(left.budget, state.bytes);
    }
  });
  known.plan = make_plan(std::move(known.plan.lap), left);
  known.options = options_version;
  known.installed = false;
}

} // namespace torch_uvm
