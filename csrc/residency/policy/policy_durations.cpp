// How a policy learns the durations of operators and iterations, and what it does with them.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "residency/policy/policy.h"

namespace torch_uvm {

using namespace scheduling;

namespace {

constexpr unsigned kReports = 2; // of each operator; the shorter duration counts
constexpr std::uint64_t kPatience = 8; // iterations in which groups that take long do not count
constexpr double kSmallOperator = 1 << 20; // bytes that stand for the time of an operator that uses none

/// Bytes that an operator uses: its share of the time of a group of operators.
double weight_of(const Iteration& iteration, std::uint32_t op) {
  double bytes = kSmallOperator;
  for (const Use& use : iteration.at(op)) {
    bytes += static_cast<double>(iteration.values[use.value].bytes);
  }
  return bytes;
}

/// Operators that used operands in place took the link's time. Gives them the mean rate of the others, if that is less.
/// \param slowed by operator: its duration is that in place
void estimate_resident(Schedule& schedule, std::vector<bool> slowed) {
  Iteration& iteration = schedule.iteration;
  for (std::uint32_t use = 0; use < iteration.uses.size(); ++use) {
    if (schedule.in_place[use]) {
      slowed[iteration.uses[use].op] = true;
    }
  }
  double ms = 0, weight = 0;
  for (std::uint32_t op = 0; op < iteration.size(); ++op) {
    if (!slowed[op]) {
      ms += static_cast<double>(iteration.ops[op].ms);
      weight += weight_of(iteration, op);
    }
  }
  for (std::uint32_t op = 0; weight > 0 && op < iteration.size(); ++op) {
    if (slowed[op]) {
      iteration.ops[op].ms = std::min(iteration.ops[op].ms, static_cast<float>(ms / weight * weight_of(iteration, op)));
    }
  }
}

} // namespace

void Policy::ask_for_durations() {
  decision_.wants_durations = false;
  if (!options_.timed || !matcher_.matched()) {
    return;
  }
  KnownSchedule& known = *matcher_.current();
  decision_.wants_durations = known.wants_durations();
  known.asked += decision_.wants_durations ? 1 : 0;
}

void Policy::ran(std::uint64_t first, std::uint64_t last, double ms, bool in_place, double host_ms) {
  KnownSchedule* const known = matcher_.current();
  if (known == nullptr || !matcher_.matched() || known->untimed == 0) {
    return;
  }
  Iteration& iteration = known->schedule.iteration;
  const std::uint32_t size = iteration.size();
  const std::uint64_t back = log_.latest() - first;
  if (back > matcher_.in_a_row()) {
    return;
  }
  if (known->untimed == kNone) {
    known->timed.assign(size, 0);
    known->slowed.assign(size, true);
    known->untimed = size;
  }
  const auto place = [&](std::uint64_t number) {
    const std::uint64_t behind = (log_.latest() - number) % size;
    return static_cast<std::uint32_t>((matcher_.position() + size - behind) % size);
  };
  // The bytes are a guess at the shares. It has to do for a loop that is lost now and then, and never timed one by one.
  const bool is_rough = last > first && ms > kLongGroupMs && known->asked <= kPatience * size;
  double all = 0;
  for (std::uint64_t number = first; number <= last; ++number) {
    all += weight_of(iteration, place(number));
  }
  const auto host_share = static_cast<float>(host_ms / static_cast<double>(last - first + 1));
  for (std::uint64_t number = first; number <= last; ++number) {
    const std::uint32_t op = place(number);
    const auto share = static_cast<float>(ms * weight_of(iteration, op) / all);
    float& known_ms = iteration.ops[op].ms;
    if (is_rough) {
      known_ms = known->timed[op] == 0 ? share : known_ms;
      continue;
    }
    known_ms = known->timed[op] == 0 ? share : std::min(known_ms, share);
    float& known_host_ms = iteration.ops[op].host_ms;
    known_host_ms = known->timed[op] == 0 ? host_share : std::min(known_host_ms, host_share);
    known->slowed[op] = known->slowed[op] && in_place;
    if (++known->timed[op] == kReports && --known->untimed == 0) {
      estimate_resident(known->schedule, known->slowed);
      solve(*known);
      return;
    }
  }
}

bool Policy::is_settled() const {
  const KnownSchedule* const known = matcher_.matched() ? matcher_.current() : nullptr;
  return !options_.timed || (known != nullptr && !known->wants_durations());
}

double Policy::predicted_ms_per_operator() const {
  const KnownSchedule* const known = matcher_.matched() ? matcher_.current() : nullptr;
  return known == nullptr ? 0 : known->schedule.predicted_ms / known->schedule.iteration.size();
}

} // namespace torch_uvm
