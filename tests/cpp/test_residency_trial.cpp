// Trials: which of several candidates is kept, by the measured durations of iterations.
#include <cstdint>
#include <utility>
#include <vector>

#include "harness.h"
#include "residency/policy/trial.h"

using namespace torch_uvm::scheduling;

namespace {

Decisions candidate(std::vector<bool> evicted_after, double predicted_ms) {
  Decisions decisions;
  decisions.evicted_after = std::move(evicted_after);
  decisions.predicted_ms = predicted_ms;
  return decisions;
}

} // namespace

TEST(a_trial_keeps_the_candidate_that_was_fastest) {
  Trial trial;
  trial.start({candidate({true, false}, 10), candidate({false, true}, 11), candidate({true, true}, 16)});
  CHECK(trial.is_running());
  const auto measure = [&](const std::vector<double>& ms) {
    bool changed = false;
    for (const double each : ms) {
      const std::uint64_t iteration = trial.begin_iteration();
      changed = trial.took(iteration, each) || changed;
    }
    return changed;
  };
  CHECK(measure({99, 99, 12, 50, 13})); // two settle; the median is 13
  CHECK(trial.current().evicted_after == std::vector<bool>({false, true}));
  CHECK(!measure({99, 99, 12, 11, 12})); // the third candidate is not worth a trial: 16 is above 1.5 times 10
  CHECK(!trial.is_running());
  CHECK(trial.current().evicted_after == std::vector<bool>({false, true}));
}

TEST(a_trial_returns_to_an_earlier_candidate) {
  Trial trial;
  trial.start({candidate({true, false}, 10), candidate({false, true}, 11)});
  std::vector<std::uint64_t> late;
  for (int at = 0; at < 5; ++at) {
    trial.took(trial.begin_iteration(), 10);
  }
  CHECK_EQ(trial.current().predicted_ms, 11.0);
  for (int at = 0; at < 4; ++at) {
    trial.took(trial.begin_iteration(), 20);
  }
  CHECK(trial.is_running());
  CHECK(trial.took(trial.begin_iteration(), 20));
  CHECK_EQ(trial.current().predicted_ms, 10.0);
}

TEST(equal_candidates_are_tried_once_and_one_alone_is_not) {
  Trial trial;
  trial.start({candidate({true}, 10), candidate({true}, 10)});
  CHECK(!trial.is_running());
  CHECK_EQ(trial.current().predicted_ms, 10.0);
}

TEST(a_trial_ignores_iterations_of_earlier_candidates) {
  Trial trial;
  trial.start({candidate({true, false}, 10), candidate({false, true}, 11)});
  std::vector<std::uint64_t> iterations;
  for (int at = 0; at < 8; ++at) { // the host runs ahead: durations come later
    iterations.push_back(trial.begin_iteration());
  }
  for (const std::uint64_t iteration : iterations) {
    trial.took(iteration, 10);
  }
  CHECK_EQ(trial.current().predicted_ms, 11.0); // three of them counted for the first, and none for the second
  for (int at = 0; at < 5; ++at) {
    CHECK(trial.is_running());
    trial.took(trial.begin_iteration(), 9);
  }
  CHECK(!trial.is_running());
}

HARNESS_MAIN()
