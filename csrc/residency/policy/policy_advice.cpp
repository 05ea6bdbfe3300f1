// A policy's decisions while operators match its schedule.
#include <algorithm>

#include "residency/policy/policy_state.h"

namespace torch_uvm {

using namespace scheduling;

namespace {

constexpr std::size_t kMaxCaughtUp = 512; // maximum number of scheduled fetches to look at when catching up

} // namespace

void Policy::State::add_to(std::vector<StorageId>& storages_to_move, std::uint32_t value) const {
  const StorageId storage = matcher.current()->bound[value];
  const StorageState* state = storage == kNoStorage ? nullptr : storages.find(storage);
  if (state != nullptr && !state->pinned) {
    storages_to_move.push_back(storage);
  }
}

void Policy::State::advise() {
  KnownSchedule& known = *matcher.current();
  if (known.options != options_version) {
    solve(known);
    catch_up = true;
    decision.forget = true;
  }
  const std::uint32_t position = matcher.position();
  for (const std::uint32_t value : known.schedule.retire[position]) {
    add_to(decision.retire, value);
  }
  for (const std::uint32_t value : known.schedule.write_back[position]) {
    add_to(decision.write_back, value);
  }
  if (!known.retired_overdue) {
    retire_overdue(known);
  }
  if (catch_up) {
    ask_for_what_is_due(known);
  }
  for (const std::uint32_t value : known.schedule.fetch[position]) {
    add_to(decision.fetch, value);
  }
}

/// Retires the storages that the schedule has on the host at this position. Their scheduled evictions are after earlier
/// operators, so `advise` would not retire them in this iteration.
void Policy::State::retire_overdue(KnownSchedule& known) {
  const Iteration& iteration = known.schedule.iteration;
  const std::uint32_t position = matcher.position();
  bool any_evicted = false;
  for (std::uint32_t value = 0; value < iteration.values.size(); ++value) {
    const std::vector<std::uint32_t>& uses = iteration.uses_of[value];
    if (uses.empty()) {
      continue;
    }
    // The latest use at or before this position.
    auto after =
        std::find_if(uses.begin(), uses.end(), [&](std::uint32_t use) { return iteration.uses[use].op > position; });
    const std::uint32_t latest = after == uses.begin() ? uses.back() : *std::prev(after);
    any_evicted |= known.schedule.evicted_after[latest];
    if (known.schedule.evicted_after[latest] && iteration.uses[latest].op != position) {
      add_to(decision.retire, value);
    }
  }
  if (any_evicted) {
    // Storages that the step does not use only take up room.
    storages.for_each([&](StorageId storage, const StorageState& state) {
      if (!state.pinned && state.last_use + iteration.size() < log.latest() &&
          matcher.value_of(storage, state) == kNone) {
        decision.retire.push_back(storage);
      }
    });
  }
  known.retired_overdue = true;
}

/// Issues the fetches scheduled before this position whose uses are still ahead.
void Policy::State::ask_for_what_is_due(const KnownSchedule& known) {
  const std::uint32_t position = matcher.position(), size = known.schedule.iteration.size();
  const std::vector<Fetch>& fetches = known.schedule.fetches;
  const auto next = std::upper_bound(fetches.begin(), fetches.end(), position,
                                     [](std::uint32_t op, const Fetch& fetch) { return op < fetch.need; });
  const std::size_t start = static_cast<std::size_t>(next - fetches.begin());
  for (std::size_t at = 0; at < std::min(fetches.size(), kMaxCaughtUp); ++at) {
    const Fetch& it = fetches[(start + at) % fetches.size()];
    const std::uint32_t ahead = (it.need + size - it.issue) % size; // at least 1
    const std::uint32_t left = (it.need + size - position) % size;
    if (left != 0 && left < ahead) {
      add_to(decision.fetch, it.value);
    }
  }
  catch_up = false;
}

} // namespace torch_uvm
