#include "residency/policy/matcher.h"

#include <algorithm>

namespace torch_uvm::scheduling {

namespace {

// Tolerate occasional extra operators (logging). After this many consecutive mismatches no schedule is followed.
constexpr unsigned kMaxMismatches = 24;
constexpr unsigned kMaxPlaces = 64; // candidates with the same hash to compare when resynchronising

std::uint64_t identity(OperatorKey key, std::size_t operands) {
  return mix_bits(key + operands);
}

std::uint64_t with_operand(std::uint64_t hash, StorageId persistent) {
  return mix_bits(hash ^ (persistent + 1));
}

std::uint64_t window(std::uint64_t first, std::uint64_t second, std::uint64_t third) {
  return mix_bits(mix_bits(first) + 3 * mix_bits(second ^ 0x5bd1e995) + 7 * third) >> 1;
}

void index_places(KnownSchedule& known) {
  const Iteration& iteration = known.schedule.iteration;
  const std::uint32_t size = iteration.size();
  std::vector<std::uint64_t> hashes(size);
  for (std::uint32_t op = 0; op < size; ++op) {
    hashes[op] = identity(iteration.ops[op].key, iteration.ops[op].operands);
    for (std::uint32_t at = 0; at < iteration.ops[op].operands; ++at) {
      hashes[op] = with_operand(hashes[op], iteration.values[iteration.at(op)[at].value].persistent);
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

void Matcher::add(Schedule schedule, std::uint64_t now, IdMap<StorageState>& storages) {
  if (schedules_.size() == kMaxSchedules) {
    const auto oldest = std::min_element(schedules_.begin(), schedules_.end(), [](const auto& left, const auto& right) {
      return left->last_followed < right->last_followed;
    });
    if (oldest->get() == current_) {
      current_ = nullptr;
    }
    schedules_.erase(oldest);
  }
  schedules_.push_back(std::make_unique<KnownSchedule>());
  KnownSchedule& known = *schedules_.back();
  known.schedule = std::move(schedule);
  known.number = ++schedules_made_;
  known.last_followed = now;
  const Iteration& iteration = known.schedule.iteration;
  known.bound.assign(iteration.values.size(), kNoStorage);
  for (std::uint32_t value = 0; value < iteration.values.size(); ++value) {
    const Value& it = iteration.values[value];
    if (it.created_at != kNone) {
      known.created += it.bytes;
    }
    if (StorageState* state = storages.find(it.latest)) {
      known.bound[value] = it.latest;
      state->value = value;
      state->schedule = known.number;
      state->persistent |= it.created_at == kNone;
    }
  }
  index_places(known);
  current_ = &known;
  position_ = iteration.size() - 1;
  matched_ = true;
  mismatches_ = 0;
}

unsigned Matcher::unproven(std::uint64_t options) const {
  return static_cast<unsigned>(std::count_if(schedules_.begin(), schedules_.end(), [options](const auto& known) {
    return known->options == options && known->followed < known->schedule.iteration.size();
  }));
}

std::uint32_t Matcher::value_of(StorageId storage, const StorageState& state) const {
  if (current_ == nullptr) {
    return kNone;
  }
  if (state.schedule == current_->number) {
    return state.value;
  }
  const std::uint32_t* value = current_->schedule.iteration.value_of.find(storage);
  return value == nullptr ? kNone : *value;
}

bool Matcher::matches(KnownSchedule& known, std::uint32_t op, OperatorKey key,
                      std::span<const SeenOperand> operands) const {
  const Iteration& iteration = known.schedule.iteration;
  if (iteration.ops[op].key != key || iteration.ops[op].operands != operands.size()) {
    return false;
  }
  const std::span<const Use> uses = iteration.at(op);
  for (std::size_t at = 0; at < operands.size(); ++at) {
    const std::uint32_t value = uses[at].value;
    const StorageState& state = *operands[at].state;
    const StorageId wanted = iteration.values[value].persistent;
    const bool plays_another = state.schedule == known.number && state.value != value && state.value != kNone;
    if (wanted != kNoStorage ? wanted != operands[at].storage : plays_another) {
      return false;
    }
  }
  return true;
}

void Matcher::bind(KnownSchedule& known, std::uint32_t op, std::span<const SeenOperand> operands) {
  const std::span<const Use> uses = known.schedule.iteration.at(op);
  for (std::size_t at = 0; at < operands.size(); ++at) {
    StorageState& state = *operands[at].state;
    if (state.schedule != known.number) {
      state.schedule = known.number;
      state.value = uses[at].value;
      known.bound[state.value] = operands[at].storage;
    }
  }
}

bool Matcher::resynchronise(OperatorKey key, std::span<const SeenOperand> operands) {
  const std::uint64_t hash = window(window_[0], window_[1], window_[2]);
  KnownSchedule* best = nullptr;
  std::uint32_t place = 0;
  for (const std::unique_ptr<KnownSchedule>& known : schedules_) {
    const std::uint32_t* found = known->places.find(hash);
    if (found == nullptr || *found == 0) {
      continue;
    }
    const std::uint32_t size = known->schedule.iteration.size();
    // If several positions match, take the nearest one ahead in the current schedule, or the first one in another.
    const std::uint32_t from = known.get() == current_ ? position_ + 1 : 0;
    std::uint32_t nearest = kNone;
    unsigned tried = 0;
    for (std::uint32_t op = *found - 1; op != kNone && tried < kMaxPlaces; op = known->same_place[op], ++tried) {
      const std::uint32_t ahead = (op + size - from % size) % size;
      if (matches(*known, op, key, operands) && (nearest == kNone || ahead < (nearest + size - from % size) % size)) {
        nearest = op;
      }
    }
    const bool better =
        best == nullptr || (best != current_ && (known.get() == current_ || size > best->schedule.iteration.size()));
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

void Matcher::go_to(KnownSchedule* known, std::uint32_t op, std::span<const SeenOperand> operands) {
  if (known != current_) { // temporaries bound when it was last followed were freed long ago
    for (std::uint32_t value = 0; value < known->bound.size(); ++value) {
      known->bound[value] = known->schedule.iteration.values[value].persistent;
    }
    current_ = known;
  }
  position_ = op;
  bind(*known, op, operands);
}

Matcher::Match Matcher::begin(OperatorKey key, std::span<const SeenOperand> operands, std::uint64_t now) {
  if (schedules_.empty()) {
    matched_ = false;
    return Match::kMissed;
  }
  window_[0] = window_[1];
  window_[1] = window_[2];
  window_[2] = identity(key, operands.size());
  for (const SeenOperand& operand : operands) {
    window_[2] = with_operand(window_[2], operand.state->persistent ? operand.storage : kNoStorage);
  }
  Match step = Match::kMatched;
  if (current_ != nullptr && matches(*current_, current_->schedule.iteration.after(position_), key, operands)) {
    position_ = current_->schedule.iteration.after(position_);
    bind(*current_, position_, operands);
    ++in_a_row_;
    if (position_ == 0) {
      current_->stale = current_->drift > current_->created / 16;
      current_->drift = 0;
    }
  } else {
    in_a_row_ = 0;
    if (resynchronise(key, operands)) {
      step = Match::kResynchronised;
    } else {
      matched_ = false;
      if (current_ == nullptr || ++mismatches_ < kMaxMismatches) {
        return Match::kMissed;
      }
      current_ = nullptr;
      return Match::kLost;
    }
  }
  matched_ = true;
  mismatches_ = 0;
  ++current_->followed;
  current_->last_followed = now;
  return step;
}

void Matcher::created(StorageId storage, StorageState& state, std::size_t place) {
  if (current_ == nullptr || !matched_) {
    return;
  }
  const Iteration& iteration = current_->schedule.iteration;
  const std::size_t use = iteration.use_begin[position_] + iteration.ops[position_].operands + place;
  if (use >= iteration.use_begin[position_ + 1]) {
    return;
  }
  state.value = iteration.uses[use].value;
  state.schedule = current_->number;
  current_->bound[state.value] = storage;
  const std::size_t planned = iteration.values[state.value].bytes;
  current_->drift += planned > state.bytes ? planned - state.bytes : state.bytes - planned;
}

void Matcher::freed(const StorageState& state) {
  if (current_ != nullptr && state.schedule == current_->number && state.value != kNone) {
    current_->bound[state.value] = kNoStorage;
  }
}

} // namespace torch_uvm::scheduling
