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

/// Measures iterations of the current candidate. \return whether another one is current
bool measure(Trial& trial, const std::vector<double>& ms) {
  bool changed = false;
  for (const double each : ms) {
    const std::uint64_t iteration = trial.begin_iteration();
    changed = trial.took(iteration, each) || changed;
  }
  return changed;
}

} // namespace

TEST(a_trial_keeps_the_candidate_that_was_fastest) {
  Trial trial;
  trial.start({candidate({true, false}, 10), candidate({false, true}, 11), candidate({true, true}, 16)});
  CHECK(trial.is_running());
  CHECK(measure(trial, {9, 9, 12, 50, 23})); // two settle; the median is 23
  CHECK(trial.current().evicted_after == std::vector<bool>({false, true}));
  CHECK(!measure(trial, {99, 99, 12, 11, 12})); // the third candidate is not worth a trial: 16 is above 1.5 times 10
  CHECK(!trial.is_running()); // 23 is above 1.25 times 12
  CHECK(trial.current().evicted_after == std::vector<bool>({false, true}));
}

TEST(a_trial_returns_to_an_earlier_candidate) {
  Trial trial;
  trial.start({candidate({true, false}, 10), candidate({false, true}, 11)});
  CHECK(measure(trial, {10, 10, 10, 10, 10}));
  CHECK_EQ(trial.current().predicted_ms, 11.0);
  CHECK(!measure(trial, {20, 20, 20, 20}));
  CHECK(trial.is_running());
  CHECK(measure(trial, {20}));
  CHECK(!trial.is_running());
  CHECK_EQ(trial.current().predicted_ms, 10.0);
}

/// The host is slow for some iterations: for two of three of the faster candidate, then for all three of it.
TEST(a_slow_spell_of_the_host_does_not_decide_a_trial) {
  for (const std::vector<double>& slow : {std::vector<double>{131, 133, 111}, std::vector<double>{131, 141, 138}}) {
    Trial trial;
    trial.start({candidate({true, false}, 10), candidate({false, true}, 11), candidate({true, true}, 12)});
    CHECK(!measure(trial, {200, 131}));
    CHECK(measure(trial, slow));
    CHECK_EQ(trial.current().predicted_ms, 11.0);
    CHECK(measure(trial, {200, 170, 170, 170, 170}));
    CHECK_EQ(trial.current().predicted_ms, 12.0);
    CHECK(measure(trial, {200, 129, 128, 129, 129}));
    CHECK_EQ(trial.current().predicted_ms, 10.0); // again; the second one is not close
    CHECK(measure(trial, {200, 112, 112, 111, 109}));
    CHECK_EQ(trial.current().predicted_ms, 12.0);
    CHECK(measure(trial, {200, 129, 128, 129, 129}));
    CHECK(!trial.is_running());
    CHECK_EQ(trial.current().predicted_ms, 10.0);
  }
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
    CHECK_EQ(trial.current().predicted_ms, 11.0);
    trial.took(trial.begin_iteration(), 9);
  }
  CHECK_EQ(trial.current().predicted_ms, 10.0); // again
}

HARNESS_MAIN()
