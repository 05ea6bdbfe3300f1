#include "residency/policy/choose_fastest.h"

#include <optional>
#include <utility>

#include "residency/policy/prediction.h"

namespace torch_uvm::scheduling {

namespace {

/// Early write-backs are made if they shorten the prediction to this part.
constexpr double kEarlyPays = 0.98;
constexpr double kNoLonger = 1 + 1e-9; // sums of durations in another order are rounded

} // namespace

void choose_fastest(Schedule& schedule, const PolicyOptions& options) {
  const std::size_t capacity = capacity_of(schedule.iteration, options);
  std::optional<Decisions> late, early;
  const auto keep_faster = [&](std::optional<Decisions>& best) {
    schedule.predicted_ms = predict_ms(schedule, options.rates, capacity);
    if (!best || schedule.predicted_ms < best->predicted_ms) {
      best = schedule;
    }
  };
  const auto try_both = [&] {
    keep_faster(late);
    write_back_early(schedule);
    keep_faster(early);
  };
  choose_evictions(schedule, options, capacity);
  place_fetches(schedule, capacity);
  try_both();
  double in_core_ms = 0;
  for (const Iteration::Op& op : schedule.iteration.ops) {
    in_core_ms += static_cast<double>(op.ms);
  }
  if (late->predicted_ms <= in_core_ms * kNoLonger) { // no other one can be faster
    static_cast<Decisions&>(schedule) = std::move(*late);
    return;
  }
  for (const GapRule rule : {GapRule::kMostExcess, GapRule::kFewest, GapRule::kStay}) {
    choose_evictions_in_time(schedule, options, capacity, rule);
    place_fetches(schedule, capacity, latest_fetches(schedule, options.rates));
    try_both();
  }
  const bool pays = early->predicted_ms < kEarlyPays * late->predicted_ms;
  static_cast<Decisions&>(schedule) = std::move(pays ? *early : *late);
}

} // namespace torch_uvm::scheduling
