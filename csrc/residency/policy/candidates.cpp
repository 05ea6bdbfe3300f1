#include "residency/policy/candidates.h"

#include <algorithm>

#include "residency/policy/prediction.h"

namespace torch_uvm::scheduling {

std::vector<Decisions> make_candidates(Schedule& schedule, const PolicyOptions& options) {
  const std::size_t capacity = capacity_of(schedule.iteration, options);
  std::vector<Decisions> candidates;
  const auto add = [&] {
    schedule.predicted_ms = predict_ms(schedule, options.rates, capacity);
    candidates.push_back(schedule);
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
