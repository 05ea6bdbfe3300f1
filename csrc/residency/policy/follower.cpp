#include "residency/policy/follower.h"

#include <algorithm>

namespace torch_uvm::planning {

namespace {

// Tolerate occasional extra operators (logging). After this many consecutive mismatches the schedule is dropped.
constexpr unsigned kMostStrayed = 24;
constexpr unsigned kMostPlaces = 64; // candidates with the same hash to compare when resynchronising

std::uint64_t identity(OperatorKey key, std::size_t operands) {
  return mix_bits(key + operands);
}

std::uint64_t with_operand(std::uint64_t hash, StorageId persistent) {
  return mix_bits(hash ^ (persistent + 1));
}

std::uint64_t window(std::uint64_t first, std::uint64_t second, std::uint64_t third) {
  return mix_bits(mix_bits(first) + 3 * mix_bits(second ^ 0x5bd1e995) + 7 * third) >> 1;
}

void index_places(KnownPlan& known) {
  const Lap& lap = known.plan.lap;
  const std::uint32_t size = lap.size();
  std::vector<std::uint64_t> hashes(size);
  for (std::uint32_t op = 0; op < size; ++op) {
    hashes[op] = identity(lap.ops[op].key, lap.ops[op].operands);
    for (std::uint32_t at = 0; at < lap.ops[op].operands; ++at) {
      hashes[op] = with_operand(hashes[op], lap.parts[lap.at(op)[at].part].persistent);
    }
  }
  known.same_place.assign(size, kNone);
  for (std::uint32_t op = 0; op < size; ++op) {
    const std::uint64_t hash = window(hashes[(op + 2 * size - 2) % size], hashes[(op + size - 1) % size], hashes[op]);
    std::uint32_t& place = known.places[hash];
    known.same_place[op] = place == 0 ? kNone : place - 1;
    place = op + 1;
  }
}

} // namespace

void Follower::add(Plan plan, std::uint64_t now, FlatMap<StorageState>& storages) {
  if (plans_.size() == kMostPlans) {
    const auto oldest = std::min_element(plans_.begin(), plans_.end(), [](const auto& left, const auto& right) {
      return left->last_followed < right->last_followed;
    });
    if (oldest->get() == current_) {
      current_ = nullptr;
    }
    plans_.erase(oldest);
  }
  plans_.push_back(std::make_unique<KnownPlan>());
  KnownPlan& known = *plans_.back();
  known.plan = std::move(plan);
  known.number = ++plans_made_;
  known.last_followed = now;
  const Lap& lap = known.plan.lap;
  known.bound.assign(lap.parts.size(), kNoStorage);
  for (std::uint32_t part = 0; part < lap.parts.size(); ++part) {
    const Part& it = lap.parts[part];
    if (it.birth != kNone) {
      known.born += it.bytes;
    }
    if (StorageState* state = storages.find(it.latest)) {
      known.bound[part] = it.latest;
      state->part = part;
      state->plan = known.number;
      state->persistent |= it.birth == kNone;
    }
  }
  index_places(known);
  current_ = &known;
  position_ = lap.size() - 1;
  matched_ = true;
  strayed_ = 0;
}

unsigned Follower::unproved() const {
  return static_cast<unsigned>(std::count_if(
      plans_.begin(), plans_.end(), [](const auto& known) { return known->followed < known->plan.lap.size(); }));
}

std::uint32_t Follower::part_of(StorageId storage, const StorageState& state) const {
  if (current_ == nullptr) {
    return kNone;
  }
  if (state.plan == current_->number) {
    return state.part;
  }
  const std::uint32_t* part = current_->plan.lap.part_of.find(storage);
  return part == nullptr ? kNone : *part;
}

bool Follower::matches(KnownPlan& known, std::uint32_t op, OperatorKey key,
                       std::span<const SeenOperand> operands) const {
  const Lap& lap = known.plan.lap;
  if (lap.ops[op].key != key || lap.ops[op].operands != operands.size()) {
    return false;
  }
  const std::span<const Event> events = lap.at(op);
  for (std::size_t at = 0; at < operands.size(); ++at) {
    const std::uint32_t part = events[at].part;
    const StorageState& state = *operands[at].state;
    const StorageId wanted = lap.parts[part].persistent;
    const bool plays_another = state.plan == known.number && state.part != part && state.part != kNone;
    if (wanted != kNoStorage ? wanted != operands[at].storage : plays_another) {
      return false;
    }
  }
  return true;
}

void Follower::bind(KnownPlan& known, std::uint32_t op, std::span<const SeenOperand> operands) {
  const std::span<const Event> events = known.plan.lap.at(op);
  for (std::size_t at = 0; at < operands.size(); ++at) {
    StorageState& state = *operands[at].state;
    if (state.plan != known.number) {
      state.plan = known.number;
      state.part = events[at].part;
      known.bound[state.part] = operands[at].storage;
    }
  }
}

bool Follower::find_again(OperatorKey key, std::span<const SeenOperand> operands) {
  const std::uint64_t hash = window(window_[0], window_[1], window_[2]);
  KnownPlan* best = nullptr;
  std::uint32_t place = 0;
  for (const std::unique_ptr<KnownPlan>& known : plans_) {
    const std::uint32_t* found = known->places.find(hash);
    if (found == nullptr || *found == 0) {
      continue;
    }
    const std::uint32_t size = known->plan.lap.size();
    // If several positions match, take the nearest one ahead in the current schedule, or the first one in another.
    const std::uint32_t from = known.get() == current_ ? position_ + 1 : 0;
    std::uint32_t nearest = kNone;
    unsigned tried = 0;
    for (std::uint32_t op = *found - 1; op != kNone && tried < kMostPlaces; op = known->same_place[op], ++tried) {
      const std::uint32_t ahead = (op + size - from % size) % size;
      if (matches(*known, op, key, operands) && (nearest == kNone || ahead < (nearest + size - from % size) % size)) {
        nearest = op;
      }
    }
    const bool better =
        best == nullptr || (best != current_ && (known.get() == current_ || size > best->plan.lap.size()));
    if (nearest != kNone && better) {
      best = known.get();
      place = nearest;
    }
  }
  if (best == nullptr) {
    return false;
  }
  go_to(best, place, operands);
  return true;
}

void Follower::go_to(KnownPlan* known, std::uint32_t op, std::span<const SeenOperand> operands) {
  if (known != current_) { // temporaries bound when it was last followed were freed long ago
    for (std::uint32_t part = 0; part < known->bound.size(); ++part) {
      known->bound[part] = known->plan.lap.parts[part].persistent;
    }
    current_ = known;
  }
  position_ = op;
  bind(*known, op, operands);
}

Follower::Step Follower::begin(OperatorKey key, std::span<const SeenOperand> operands, std::uint64_t now) {
  if (plans_.empty()) {
    matched_ = false;
    return Step::kMissed;
  }
  window_[0] = window_[1];
  window_[1] = window_[2];
  window_[2] = identity(key, operands.size());
  for (const SeenOperand& operand : operands) {
    window_[2] = with_operand(window_[2], operand.state->persistent ? operand.storage : kNoStorage);
  }
  Step step = Step::kAsPlanned;
  if (current_ != nullptr && matches(*current_, current_->plan.lap.after(position_), key, operands)) {
    position_ = current_->plan.lap.after(position_);
    bind(*current_, position_, operands);
    ++in_a_row_;
    if (position_ == 0) {
      current_->stale = current_->drift > current_->born / 16;
      current_->drift = 0;
    }
  } else {
    in_a_row_ = 0;
    if (find_again(key, operands)) {
      step = Step::kFoundAgain;
    } else {
      matched_ = false;
      if (current_ == nullptr || ++strayed_ < kMostStrayed) {
        return Step::kMissed;
      }
      current_ = nullptr;
      return Step::kLost;
    }
  }
  matched_ = true;
  strayed_ = 0;
  ++current_->followed;
  current_->last_followed = now;
  return step;
}

void Follower::born(StorageId storage, StorageState& state, std::size_t place) {
  if (current_ == nullptr || !matched_) {
    return;
  }
  const Lap& lap = current_->plan.lap;
  const std::size_t event = lap.event_begin[position_] + lap.ops[position_].operands + place;
  if (event >= lap.event_begin[position_ + 1]) {
    return;
  }
  state.part = lap.events[event].part;
  state.plan = current_->number;
  current_->bound[state.part] = storage;
  const std::size_t planned = lap.parts[state.part].bytes;
  current_->drift += planned > state.bytes ? planned - state.bytes : state.bytes - planned;
}

void Follower::died(const StorageState& state) {
  if (current_ != nullptr && state.plan == current_->number && state.part != kNone) {
    current_->bound[state.part] = kNoStorage;
  }
}

} // namespace torch_uvm::planning
