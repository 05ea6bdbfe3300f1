// How a policy learns the durations of operators and iterations, and what it does with them.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "residency/policy/policy.h"

namespace torch_uvm {

using namespace scheduling;

namespace {

constexpr unsigned kReports = 2; // of each operator; the shorter duration counts
constexpr double kSmallOperator = 1 << 20; // bytes that stand for the time of an operator that uses none

/// Bytes that an operator uses: a guess at its share of a time.
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

void Policy::ran(std::uint64_t number, double ms, bool in_place, double host_ms, bool waited) {
  KnownSchedule* const known = matcher_.current();
  if (known == nullptr || !matcher_.matched() || known->untimed == 0) {
    return;
  }
  const std::uint32_t size = known->schedule.iteration.size();
  const std::uint64_t back = log_.latest() - number;
  if (back > matcher_.in_a_row()) {
    return;
  }
  if (known->untimed == kNone) {
    known->timed.assign(size, 0);
    known->slowed.assign(size, true);
    known->untimed = size;
  }
  const auto op = static_cast<std::uint32_t>((matcher_.position() + size - back % size) % size);
  const auto least = [](float& so_far, double now) {
    so_far =
        so_far == 0 || now == 0 ? std::max(so_far, static_cast<float>(now)) : std::min(so_far, static_cast<float>(now));
  };
  Iteration::Op& timed = known->schedule.iteration.ops[op];
  least(timed.ms, ms);
  least(timed.host_ms, host_ms);
  timed.waits |= waited;
  known->slowed[op] = known->slowed[op] && in_place;
  if (++known->timed[op] == kReports && --known->untimed == 0) {
    estimate_resident(known->schedule, known->slowed);
    solve(*known);
  }
}

bool Policy::is_settled() const {
  const KnownSchedule* const known = matcher_.matched() ? matcher_.current() : nullptr;
  return !options_.timed || (known != nullptr && !known->wants_durations());
}

} // namespace torch_uvm
