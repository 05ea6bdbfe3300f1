#include "residency/policy/candidates.h"

#include <algorithm>

#include "residency/policy/prediction.h"

namespace torch_uvm::scheduling {

namespace {

/// Early write-backs have to shorten the prediction to this part. With less of a gain some rows take longer in modelled
/// time, where memory has fragments.
constexpr double kEarlyPays = 0.98;

} // namespace

std::vector<Decisions> make_candidates(Schedule& schedule, const PolicyOptions& options) {
  const std::size_t capacity = capacity_of(schedule.iteration, options);
  std::vector<Decisions> candidates;
  const auto add = [&] {
    schedule.predicted_ms = predict_ms(schedule, options.rates, capacity);
    candidates.push_back(schedule);
    write_back_early(schedule);
    schedule.predicted_ms = predict_ms(schedule, options.rates, capacity);
    if (schedule.predicted_ms < kEarlyPays * candidates.back().predicted_ms) {
      candidates.back() = schedule;
    }
  };
  choose_evictions(schedule, options, capacity);
  place_fetches(schedule, capacity);
  add();
  for (const GapRule rule : {GapRule::kMostExcess, GapRule::kLongest}) {
    choose_evictions_in_time(schedule, options, capacity, rule);
    place_fetches(schedule, capacity, latest_fetches(schedule, options.rates));
    add();
  }
  std::ranges::stable_sort(candidates, {}, &Decisions::predicted_ms);
  return candidates;
}

} // namespace torch_uvm::scheduling
