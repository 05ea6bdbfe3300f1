#include "residency/policy/candidates.h"

#include <algorithm>

#include "residency/policy/prediction.h"

namespace torch_uvm::scheduling {

namespace {

/// Early write-backs are worth a trial if they shorten the prediction to this part.
constexpr double kEarlyPays = 0.98;

} // namespace

std::vector<Decisions> make_candidates(Schedule& schedule, const PolicyOptions& options) {
  const std::size_t capacity = capacity_of(schedule.iteration, options);
  std::vector<Decisions> candidates, early;
  const auto add = [&](std::vector<Decisions>& to) {
    schedule.predicted_ms = predict_ms(schedule, options.rates, capacity);
    to.push_back(schedule);
  };
  const auto add_both = [&] {
    add(candidates);
    write_back_early(schedule);
    add(early);
  };
  choose_evictions(schedule, options, capacity);
  place_fetches(schedule, capacity);
  add_both();
  for (const GapRule rule : {GapRule::kMostExcess, GapRule::kLongest}) {
    choose_evictions_in_time(schedule, options, capacity, rule);
    place_fetches(schedule, capacity, latest_fetches(schedule, options.rates));
    add_both();
  }
  std::ranges::stable_sort(candidates, {}, &Decisions::predicted_ms);
  const auto best = std::ranges::min_element(early, {}, &Decisions::predicted_ms);
  if (best->predicted_ms < kEarlyPays * candidates.front().predicted_ms) {
    candidates.insert(candidates.begin(), std::move(*best));
  }
  return candidates;
}

} // namespace torch_uvm::scheduling
