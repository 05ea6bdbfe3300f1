// A policy's decisions while operators match its schedule.
#include <algorithm>

#include "residency/policy/policy_state.h"

namespace torch_uvm {

using namespace planning;

namespace {

constexpr std::size_t kMostCaughtUp = 512; // maximum number of scheduled fetches to look at when catching up

} // namespace

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
}

/// Retires the storages that the schedule has on the host at this position. Their scheduled evictions are after earlier
/// operators, so `advise` would not retire them in this iteration.
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
    // Storages that the step does not use only take up room.
    storages.for_each([&](StorageId storage, const StorageState& state) {
      if (!state.held && state.last_use + lap.size() < log.latest() && follower.part_of(storage, state) == kNone) {
        decision.retire.push_back(storage);
      }
    });
  }
  known.installed = true;
}

/// Issues the fetches scheduled before this position whose uses are still ahead.
void Policy::State::ask_for_what_is_due(const KnownPlan& known) {
  const std::uint32_t position = follower.position(), size = known.plan.lap.size();
  const std::vector<Fetch>& fetches = known.plan.fetches;
  const auto next = std::upper_bound(fetches.begin(), fetches.end(), position,
                                     [](std::uint32_t op, const Fetch& fetch) { return op < fetch.need; });
  const std::size_t start = static_cast<std::size_t>(next - fetches.begin());
  for (std::size_t at = 0; at < std::min(fetches.size(), kMostCaughtUp); ++at) {
    const Fetch& it = fetches[(start + at) % fetches.size()];
    const std::uint32_t ahead = (it.need + size - it.issue) % size; // at least 1
    const std::uint32_t left = (it.need + size - position) % size;
    if (left != 0 && left < ahead) {
      fetch(it.part);
    }
  }
  catch_up = false;
}

} // namespace torch_uvm
