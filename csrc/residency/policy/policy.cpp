#include "residency/policy/policy.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "residency/policy/policy_state.h"

namespace torch_uvm {

using namespace scheduling;

namespace {

constexpr double kNoUse = std::numeric_limits<double>::infinity();

} // namespace

Policy::Policy(PolicyOptions options) : state_(std::make_unique<State>()) {
  state_->options = options;
}

Policy::~Policy() = default;

void Policy::set_options(const PolicyOptions& options) {
  state_->options = options;
  ++state_->options_version;
  // Do not delay: unproven schedules were made for other options.
  state_->next_scheduling = state_->next_marked_scheduling = 0;
}

void Policy::created(StorageId storage, std::size_t bytes) {
  if (StorageState* known = state_->storages.find(storage)) {
    known->bytes = bytes;
  } else {
    state_->created_now(storage, bytes, /*found=*/true);
  }
}

void Policy::freed(StorageId storage) {
  State& it = *state_;
  if (const StorageState* known = it.storages.find(storage)) {
    it.log.log_free(storage);
    it.matcher.freed(*known);
    it.storages.erase(storage);
  }
}

void Policy::pin(StorageId storage, bool pinned) {
  if (StorageState* known = state_->storages.find(storage)) {
    known->pinned = pinned;
  }
}

void Policy::moved(StorageId storage, bool to_host) {
  if (StorageState* known = state_->storages.find(storage)) {
    known->on_host = to_host;
  }
}

void Policy::State::see(std::span<const Access> accesses) {
  const std::uint64_t number = log.latest() + 1;
  const std::size_t known = storages.size();
  operands.clear();
  seen.clear();
  for (const Access& access : accesses) {
    StorageState* state = storages.find(access.storage);
    if (state == nullptr) {
      state = &created_now(access.storage, 0, /*found=*/true);
    }
    if (state->last_use == number) {
      operands[state->operand].access.writes |= access.writes;
      continue;
    }
    operands.push_back(
        {{access.storage, state->created_at, state->bytes, access.writes, state->found}, state->last_use});
    seen.push_back({access.storage, state});
    state->operand = static_cast<std::uint32_t>(operands.size() - 1);
    state->last_use = number;
  }
  if (storages.size() != known) { // an insertion may have invalidated the pointers
    for (SeenOperand& operand : seen) {
      operand.state = storages.find(operand.storage);
    }
  }
}

void Policy::State::expect_results(OperatorKey key) {
  kind = key;
  for (const Operand& operand : operands) {
    kind = mix_bits(kind ^ operand.access.bytes);
  }
  if (const auto found = results.find(kind); found != results.end()) {
    decision.births = found->second.births;
    decision.workspace = found->second.workspace;
  }
  if (names.insert(key).second) {
    decision.guess = largest_result;
  }
}

const Decision& Policy::begin(OperatorKey key, std::span<const Access> accesses, bool in_place_ok) {
  State& it = *state_;
  if (std::exchange(it.step_ended, false)) {
    it.end_marked_step();
  }
  it.consider_scheduling();
  it.see(accesses);
  it.log.begin(key, it.operands, in_place_ok);
  it.in_place_ok = in_place_ok;
  it.created = 0;
  const Matcher::Match match = it.matcher.begin(key, it.seen, it.log.latest());
  it.counters.following = it.matcher.matched();
  ++(it.counters.following ? it.counters.plan_hits : it.counters.plan_misses);
  if (match == Matcher::Match::kResynchronised) {
    ++it.counters.resynchronised;
    it.catch_up = it.forget = true;
  } else if (match == Matcher::Match::kLost) {
    it.forget = true;
  }
  it.decision.fetch.clear();
  it.decision.retire.clear();
  it.decision.write_back.clear();
  it.decision.forget = false;
  it.decision.births.clear();
  it.decision.workspace = 0;
  it.decision.guess = 0;
  it.ask_for_durations();
  if (it.counters.following) {
    const Schedule& schedule = it.matcher.current()->schedule;
    const std::uint32_t position = it.matcher.position();
    it.decision.workspace = schedule.iteration.ops[position].workspace;
    for (const Use& use : schedule.iteration.at(position)) {
      if (use.is_creation) {
        it.decision.births.push_back(schedule.iteration.values[use.value].bytes);
      }
    }
  } else {
    it.expect_results(key);
  }
  return it.decision;
}

const Decision& Policy::end(std::span<const std::pair<StorageId, std::size_t>> births, std::size_t workspace) {
  State& it = *state_;
  it.log.workspace(workspace);
  for (const auto& [storage, bytes] : births) {
    it.created_now(storage, bytes, /*found=*/false);
  }
  if (!it.counters.following && (!births.empty() || workspace != 0)) {
    if (it.results.size() >= State::kMaxResults) {
      it.results.clear();
    }
    State::Results& results = it.results[it.kind];
    results.births.clear();
    results.workspace = workspace;
    for (const auto& [storage, bytes] : births) {
      results.births.push_back(bytes);
      it.largest_result = std::max(it.largest_result, bytes);
    }
  }
  it.decision.fetch.clear();
  it.decision.retire.clear();
  it.decision.write_back.clear();
  it.decision.births.clear();
  it.decision.forget = it.forget;
  it.forget = false;
  if (it.matcher.matched()) {
    it.advise();
  }
  return it.decision;
}

void Policy::mark_step() {
  state_->step_ended = true; // what the step leaves is freed until the next operator: gradients, by zero_grad
}

std::optional<NextUse> Policy::State::next_use(StorageId storage) const {
  const StorageState* state = storages.find(storage);
  const KnownSchedule* known = matcher.current();
  const std::uint32_t value = state == nullptr ? kNone : matcher.value_of(storage, *state);
  if (value == kNone || known->schedule.iteration.uses_of[value].empty()) {
    return std::nullopt;
  }
  const Iteration& iteration = known->schedule.iteration;
  const std::vector<std::uint32_t>& uses = iteration.uses_of[value];
  const std::uint32_t position = matcher.position(), size = iteration.size();
  const std::uint32_t first = iteration.uses[uses.front()].op;
  const auto since_first = [&](std::uint32_t op) { return op >= first ? op - first : op + size - first; };
  const auto next = std::upper_bound(
      uses.begin(), uses.end(), since_first(position),
      [&](std::uint32_t distance, std::uint32_t use) { return distance < since_first(iteration.uses[use].op); });
  if (next == uses.end() && iteration.values[value].created_at != kNone) {
    return std::nullopt;
  }
  const std::uint32_t use = next == uses.end() ? uses.front() : *next;
  const std::uint32_t op = iteration.uses[use].op;
  return NextUse{op > position ? op - position : op + size - position, known->schedule.in_place[use]};
}

double Policy::next_use(StorageId storage) const {
  const std::optional<NextUse> next = state_->next_use(storage);
  return next ? next->ahead : kNoUse;
}

double Policy::next_use_on_device(StorageId storage) const {
  const std::optional<NextUse> next = state_->next_use(storage);
  return next && !next->in_place ? next->ahead : kNoUse;
}

bool Policy::use_in_place(StorageId storage) const {
  const State& it = *state_;
  const StorageState* state = it.storages.find(storage);
  if (state == nullptr || state->last_use != it.log.latest() || !it.in_place_ok || !it.options.in_place) {
    return false;
  }
  if (!it.matcher.matched()) {
    return true; // without a schedule a fetch is likely to evict something that is needed sooner
  }
  const KnownSchedule& known = *it.matcher.current();
  return known.schedule.in_place[known.schedule.iteration.use_begin[it.matcher.position()] + state->operand];
}

Policy::Counters Policy::counters() const {
  return state_->counters;
}

std::uint64_t Policy::operators() const {
  return state_->log.latest();
}

std::pair<const Schedule*, std::uint32_t> Policy::schedule() const {
  const Matcher& matcher = state_->matcher;
  return {matcher.matched() ? &matcher.current()->schedule : nullptr, matcher.position()};
}

std::uint64_t Policy::step_length() const {
  return state_->matcher.matched() ? state_->matcher.current()->schedule.iteration.size() : 0;
}

} // namespace torch_uvm
