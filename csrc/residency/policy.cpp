#include "residency/policy.h"

#include <algorithm>
#include <array>
#include <limits>

#include "residency/flat_map.h"
#include "residency/follower.h"
#include "residency/lap.h"
#include "residency/operator_log.h"
#include "residency/plan.h"

namespace torch_uvm {

using namespace planning;

namespace {

constexpr unsigned kLongestWait = 6; // powers of two laps between plans while others have not proved themselves
constexpr std::size_t kMarkedSteps = 16; // that are remembered
constexpr std::size_t kMostCaughtUp = 512; // fetches that are asked for at once

} // namespace

struct Policy::State {
  PolicyOptions options;
  std::uint64_t options_version = 1;
  FlatMap<StorageState> storages;
  OperatorLog log;
  Follower follower;
  Counters counters;
  Decision decision;
  std::vector<Operand> operands; ///< of the latest operator
  std::vector<SeenOperand> seen;
  std::size_t born = 0; ///< storages since it began
  bool in_place_ok = false;
  bool catch_up = false; ///< a plan was entered in its midst
  bool forget = false;
  std::uint64_t next_planning = 0; ///< not before this operator
  std::uint64_t last_mark = 0; ///< the last operator of the marked step before this one
  std::uint64_t mark_before = 0; ///< ... and of the one before that
  std::array<std::uint64_t, kMarkedSteps> marked{}; ///< hashes of the latest marked steps
  std::size_t next_marked = 0;

  StorageState& born_now(StorageId storage, std::size_t bytes) {
    StorageState& state = storages[storage];
    state = StorageState{};
    state.bytes = bytes;
    state.birth = log.latest();
    log.birth({storage, bytes});
    follower.born(storage, state, born++);
    return state;
  }

  void see(std::span<const Access> accesses);
  void consider_planning();
  void plan_last(std::uint64_t operators, bool repeated);
  void end_marked_step();
  void solve(KnownPlan& known);
  void advise();
  void retire(std::uint32_t part);
  void fetch(std::uint32_t part);
  void install(KnownPlan& known);
  void ask_for_what_is_due(const KnownPlan& known);
};

Policy::Policy(PolicyOptions options) : state_(std::make_unique<State>()) {
  state_->options = options;
}

Policy::~Policy() = default;

void Policy::set_options(const PolicyOptions& options) {
  state_->options = options;
  ++state_->options_version;
}

void Policy::created(StorageId storage, std::size_t bytes) {
  if (StorageState* known = state_->storages.find(storage)) {
    known->bytes = bytes;
  } else {
    state_->born_now(storage, bytes);
  }
}

void Policy::died(StorageId storage) {
  State& it = *state_;
  if (const StorageState* known = it.storages.find(storage)) {
    it.log.death(storage);
    it.follower.died(*known);
    it.storages.erase(storage);
  }
}

void Policy::hold(StorageId storage, bool held) {
  if (StorageState* known = state_->storages.find(storage)) {
    known->held = held;
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
      state = &born_now(access.storage, 0);
    }
    if (state->last_use == number) {
      operands[state->operand].access.writes |= access.writes;
      continue;
    }
    operands.push_back({{access.storage, state->birth, state->bytes, access.writes}, state->last_use});
    seen.push_back({access.storage, state});
    state->operand = static_cast<std::uint32_t>(operands.size() - 1);
    state->last_use = number;
  }
  if (storages.size() != known) { // a new one may have moved the others
    for (SeenOperand& operand : seen) {
      operand.state = storages.find(operand.storage);
    }
  }
}

const Decision& Policy::begin(OperatorKey key, std::span<const Access> accesses, bool in_place_ok) {
  State& it = *state_;
  it.consider_planning();
  it.see(accesses);
  it.log.begin(key, it.operands, in_place_ok);
  it.in_place_ok = in_place_ok;
  it.born = 0;
  const Follower::Step step = it.follower.begin(key, it.seen, it.log.latest());
  it.counters.following = it.follower.matched();
  ++(it.counters.following ? it.counters.plan_hits : it.counters.plan_misses);
  if (step == Follower::Step::kFoundAgain) {
    ++it.counters.resynchronised;
    it.catch_up = it.forget = true;
  } else if (step == Follower::Step::kLost) {
    it.forget = true;
  }
  it.decision.fetch.clear();
  it.decision.retire.clear();
  it.decision.forget = false;
  it.decision.room = it.counters.following ? it.follower.current()->plan.own_room[it.follower.position()] : 0;
  return it.decision;
}

const Decision& Policy::end(std::span<const std::pair<StorageId, std::size_t>> births, std::size_t workspace) {
  State& it = *state_;
  it.log.workspace(workspace);
  for (const auto& [storage, bytes] : births) {
    it.born_now(storage, bytes);
  }
  it.decision.fetch.clear();
  it.decision.retire.clear();
  it.decision.room = 0;
  it.decision.forget = it.forget;
  it.forget = false;
  if (it.follower.matched()) {
    it.advise();
  }
  return it.decision;
}

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
    if (log.repeats(operators)) {
      plan_last(operators, true);
      return;
    }
  }
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
    plan_last(operators, false);
  }
}

void Policy::State::solve(KnownPlan& known) {
  for (Part& part : known.plan.lap.parts) {
    const StorageState* state = part.persistent == kNoStorage ? nullptr : storages.find(part.persistent);
    part.held = state != nullptr && state->held;
  }
  known.plan = make_plan(std::move(known.plan.lap), options);
  known.options = options_version;
  known.installed = false;
}

void Policy::State::retire(std::uint32_t part) {
  const StorageId storage = follower.current()->bound[part];
  const StorageState* state = storage == kNoStorage ? nullptr : storages.find(storage);
  if (state != nullptr && !state->held) {
    decision.retire.push_back(storage);
  }
}

void Policy::State::fetch(std::uint32_t part) {
  const StorageId storage = follower.current()->bound[part];
  const StorageState* state = storage == kNoStorage ? nullptr : storages.find(storage);
  if (state != nullptr && !state->held) {
    decision.fetch.push_back(storage);
  }
}

void Policy::State::advise() {
  KnownPlan& known = *follower.current();
  if (known.options != options_version) {
    solve(known);
    catch_up = true;
    decision.forget = true;
  }
  const std::uint32_t position = follower.position();
  for (const std::uint32_t part : known.plan.retire[position]) {
    retire(part);
  }
  if (!known.installed) {
    install(known);
  }
  if (catch_up) {
    ask_for_what_is_due(known);
  }
  for (const std::uint32_t part : known.plan.fetch[position]) {
    fetch(part);
  }
  decision.room = known.plan.room[position];
}

/// What the plan has on the host by now leaves: for much of it no operator would ever say so.
void Policy::State::install(KnownPlan& known) {
  const Lap& lap = known.plan.lap;
  const std::uint32_t position = follower.position();
  bool any_leaves = false;
  for (std::uint32_t part = 0; part < lap.parts.size(); ++part) {
    const std::vector<std::uint32_t>& events = lap.events_of[part];
    if (events.empty()) {
      continue;
    }
    // The latest event at or before this position.
    auto after = std::find_if(events.begin(), events.end(),
                              [&](std::uint32_t event) { return lap.events[event].op > position; });
    const std::uint32_t latest = after == events.begin() ? events.back() : *std::prev(after);
    any_leaves |= known.plan.leaves[latest];
    if (known.plan.leaves[latest] && lap.events[latest].op != position) {
      retire(part);
    }
  }
  if (any_leaves) {
    // What the step does not use is in its way.
    storages.for_each([&](StorageId storage, const StorageState& state) {
      if (!state.held && state.last_use + lap.size() < log.latest() && follower.part_of(storage, state) == kNone) {
        decision.retire.push_back(storage);
      }
    });
  }
  known.installed = true;
}

/// The fetches that the plan has asked for before this position and that are still ahead.
void Policy::State::ask_for_what_is_due(const KnownPlan& known) {
  const std::uint32_t position = follower.position(), size = known.plan.lap.size();
  const std::vector<Fetch>& fetches = known.plan.fetches;
  const auto next = std::upper_bound(fetches.begin(), fetches.end(), position,
                                     [](std::uint32_t op, const Fetch& fetch) { return op < fetch.need; });
  const std::size_t start = static_cast<std::size_t>(next - fetches.begin());
  for (std::size_t at = 0; at < std::min(fetches.size(), kMostCaughtUp); ++at) {
    const Fetch& it = fetches[(start + at) % fetches.size()];
    const std::uint32_t ahead = (it.need + size - it.issue) % size; // 1 and more
    const std::uint32_t left = (it.need + size - position) % size;
    if (left != 0 && left < ahead) {
      fetch(it.part);
    }
  }
  catch_up = false;
}

void Policy::mark_step() {
  state_->end_marked_step();
}

double Policy::next_use(StorageId storage) const {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const State& it = *state_;
  const StorageState* state = it.storages.find(storage);
  const KnownPlan* known = it.follower.current();
  const std::uint32_t part = state == nullptr ? kNone : it.follower.part_of(storage, *state);
  if (part == kNone || known->plan.lap.events_of[part].empty()) {
    return kNever;
  }
  const Lap& lap = known->plan.lap;
  const std::vector<std::uint32_t>& events = lap.events_of[part];
  const std::uint32_t position = it.follower.position(), size = lap.size();
  const std::uint32_t first = lap.events[events.front()].op;
  const auto since_first = [&](std::uint32_t op) { return (op + size - first) % size; };
  const auto next = std::upper_bound(
      events.begin(), events.end(), since_first(position),
      [&](std::uint32_t value, std::uint32_t event) { return value < since_first(lap.events[event].op); });
  if (next == events.end() && lap.parts[part].birth != kNone) {
    return kNever;
  }
  const std::uint32_t op = next == events.end() ? first : lap.events[*next].op;
  return op > position ? op - position : op + size - position;
}

std::uint64_t Policy::last_use(StorageId storage) const {
  const StorageState* state = state_->storages.find(storage);
  return state == nullptr ? 0 : std::max(state->last_use, state->birth);
}

bool Policy::use_in_place(StorageId storage) const {
  const State& it = *state_;
  const StorageState* state = it.storages.find(storage);
  if (state == nullptr || state->last_use != it.log.latest() || !it.in_place_ok || !it.options.in_place) {
    return false;
  }
  if (!it.follower.matched()) {
    return true; // without a plan a fetch is likely to throw out what is needed sooner
  }
  const KnownPlan& known = *it.follower.current();
  return known.plan.in_place[known.plan.lap.event_begin[it.follower.position()] + state->operand];
}

Policy::Counters Policy::counters() const {
  return state_->counters;
}

} // namespace torch_uvm
