#include "residency/policy/policy.h"

#include <algorithm>
#include <limits>

namespace torch_uvm {

using namespace scheduling;

namespace {

constexpr double kNoUse = std::numeric_limits<double>::infinity();
constexpr std::size_t kMaxResults = 4096; // entries of `results_`

} // namespace

void Policy::set_options(const PolicyOptions& options) {
  options_ = options;
  ++options_version_;
  // Do not delay: unproven schedules were made for other options.
  next_scheduling_ = next_marked_scheduling_ = 0;
}

void Policy::created(StorageId storage, std::size_t bytes) {
  if (StorageState* known = storages_.find(storage)) {
    bytes_ = bytes_ - known->bytes + bytes;
    known->bytes = bytes;
  } else {
    created_now(storage, bytes, /*found=*/true);
  }
}

void Policy::freed(StorageId storage) {
  if (const StorageState* known = storages_.find(storage)) {
    log_.log_free(storage);
    matcher_.freed(*known);
    bytes_ -= known->bytes;
    storages_.erase(storage);
  }
}

void Policy::pin(StorageId storage, bool pinned) {
  if (StorageState* known = storages_.find(storage)) {
    known->pinned = pinned;
  }
}

StorageState& Policy::created_now(StorageId storage, std::size_t bytes, bool found) {
  StorageState& state = storages_[storage];
  state = StorageState{};
  state.found = found;
  state.bytes = bytes;
  state.created_at = log_.latest();
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  log_.log_creation({storage, bytes});
  matcher_.created(storage, state, created_++);
  return state;
}

void Policy::see(std::span<const Access> accesses) {
  const std::uint64_t number = log_.latest() + 1;
  operands_.clear();
  seen_.clear();
  for (const Access& access : accesses) {
    StorageState* state = storages_.find(access.storage);
    if (state == nullptr) {
      state = &created_now(access.storage, 0, /*found=*/true);
    }
    if (state->last_use == number) {
      operands_[state->operand].access.writes |= access.writes;
      continue;
    }
    operands_.push_back(
        {{access.storage, state->created_at, state->bytes, access.writes, state->found}, state->last_use});
    seen_.push_back({access.storage, state});
    state->operand = static_cast<std::uint32_t>(operands_.size() - 1);
    state->last_use = number;
  }
}

void Policy::expect_results(OperatorKey key) {
  kind_ = key;
  for (const Operand& operand : operands_) {
    kind_ = mix_bits(kind_ ^ operand.access.bytes);
  }
  if (const auto found = results_.find(kind_); found != results_.end()) {
    decision_.births = found->second.births;
    decision_.workspace = found->second.workspace;
  }
  if (names_.insert(key).second) {
    decision_.guess = largest_result_;
  }
}

const Decision& Policy::begin(OperatorKey key, std::span<const Access> accesses, bool in_place_ok) {
  if (std::exchange(step_ended_, false)) {
    end_marked_step();
  }
  consider_scheduling();
  see(accesses);
  log_.begin(key, operands_, in_place_ok);
  in_place_ok_ = in_place_ok;
  created_ = 0;
  const Matcher::Match match = matcher_.begin(key, seen_, log_.latest());
  counters_.following = matcher_.matched();
  ++(counters_.following ? counters_.plan_hits : counters_.plan_misses);
  if (match == Matcher::Match::kResynchronised) {
    ++counters_.resynchronised;
    catch_up_ = forget_ = true;
  } else if (match == Matcher::Match::kLost) {
    forget_ = true;
  }
  decision_.clear();
  ask_for_durations();
  if (counters_.following) {
    const Schedule& schedule = matcher_.current()->schedule;
    const std::uint32_t position = matcher_.position();
    decision_.workspace = schedule.iteration.ops[position].workspace;
    for (const Use& use : schedule.iteration.at(position)) {
      if (use.is_creation) {
        decision_.births.push_back(schedule.iteration.values[use.value].bytes);
      }
    }
  } else {
    expect_results(key);
  }
  return decision_;
}

const Decision& Policy::end(std::span<const std::pair<StorageId, std::size_t>> births, std::size_t workspace) {
  log_.workspace(workspace);
  for (const auto& [storage, bytes] : births) {
    created_now(storage, bytes, /*found=*/false);
  }
  if (!counters_.following && (!births.empty() || workspace != 0)) {
    if (results_.size() >= kMaxResults) {
      results_.clear();
    }
    Results& results = results_[kind_];
    results.births.clear();
    results.workspace = workspace;
    for (const auto& [storage, bytes] : births) {
      results.births.push_back(bytes);
      largest_result_ = std::max(largest_result_, bytes);
    }
  }
  decision_.clear();
  decision_.forget = std::exchange(forget_, false);
  if (matcher_.matched()) {
    advise();
  }
  return decision_;
}

// --- decisions while operators match the schedule ---------------------------------------------------------------

void Policy::add_to(std::vector<StorageId>& storages_to_move, std::uint32_t value) const {
  const StorageId storage = matcher_.current()->bound[value];
  const StorageState* state = storage == kNoStorage ? nullptr : storages_.find(storage);
  if (state != nullptr && !state->pinned) {
    storages_to_move.push_back(storage);
  }
}

void Policy::advise() {
  KnownSchedule& known = *matcher_.current();
  if (known.options != options_version_) {
    solve(known);
    catch_up_ = true;
    decision_.forget = true;
  }
  const std::uint32_t position = matcher_.position();
  for (const std::uint32_t value : known.schedule.retire[position]) {
    add_to(decision_.retire, value);
  }
  for (const std::uint32_t value : known.schedule.write_back[position]) {
    add_to(decision_.write_back, value);
  }
  if (catch_up_) {
    ask_for_what_is_due(known);
  }
  for (const std::uint32_t value : known.schedule.fetch[position]) {
    add_to(decision_.fetch, value);
  }
}

/// Issues the fetches scheduled before this position whose uses are still ahead.
void Policy::ask_for_what_is_due(const KnownSchedule& known) {
  const std::uint32_t position = matcher_.position(), size = known.schedule.iteration.size();
  const std::vector<Fetch>& fetches = known.schedule.fetches;
  const auto next = std::upper_bound(fetches.begin(), fetches.end(), position,
                                     [](std::uint32_t op, const Fetch& fetch) { return op < fetch.need; });
  const std::size_t start = static_cast<std::size_t>(next - fetches.begin());
  for (std::size_t at = 0; at < fetches.size(); ++at) {
    const Fetch& it = fetches[(start + at) % fetches.size()];
    const std::uint32_t ahead = (it.need + size - it.issue) % size; // at least 1
    const std::uint32_t left = (it.need + size - position) % size;
    if (left != 0 && left < ahead) {
      add_to(decision_.fetch, it.value);
    }
  }
  catch_up_ = false;
}

// --- what is known of a storage ---------------------------------------------------------------------------------

std::optional<NextUse> Policy::find_next_use(StorageId storage) const {
  const StorageState* state = storages_.find(storage);
  const KnownSchedule* known = matcher_.current();
  const std::uint32_t value = state == nullptr ? kNone : matcher_.value_of(storage, *state);
  if (value == kNone || known->schedule.iteration.uses_of[value].empty()) {
    return std::nullopt;
  }
  const Iteration& iteration = known->schedule.iteration;
  const std::vector<std::uint32_t>& uses = iteration.uses_of[value];
  const std::uint32_t position = matcher_.position(), size = iteration.size();
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
  const std::optional<NextUse> next = find_next_use(storage);
  return next ? next->ahead : kNoUse;
}

double Policy::next_use_on_device(StorageId storage) const {
  const std::optional<NextUse> next = find_next_use(storage);
  return next && !next->in_place ? next->ahead : kNoUse;
}

bool Policy::use_in_place(StorageId storage) const {
  const StorageState* state = storages_.find(storage);
  if (state == nullptr || state->last_use != log_.latest() || !in_place_ok_ || !options_.in_place) {
    return false;
  }
  if (!matcher_.matched()) {
    return true; // without a schedule a fetch is likely to evict something that is needed sooner
  }
  const KnownSchedule& known = *matcher_.current();
  return known.schedule.in_place[known.schedule.iteration.use_begin[matcher_.position()] + state->operand];
}

} // namespace torch_uvm
