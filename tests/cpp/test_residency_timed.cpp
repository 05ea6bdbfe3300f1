// Schedules from durations: predictions, evictions whose transfers are hidden, late fetches, and what the policy asks
// for. Rates are one byte a millisecond, so that times can be worked out by hand.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "harness.h"
#include "residency/policy/policy.h"
#include "residency/policy/schedule.h"
#include "residency_script.h"

using namespace torch_uvm;
using namespace torch_uvm::scheduling;
using script::evictions;
using script::Script;
using script::timed;

namespace {

PolicyOptions options(std::size_t budget) {
  PolicyOptions result = script::options(budget);
  result.timed = true;
  result.rates = script::ideal(1, 1, 1);
  return result;
}

/// Storage 1 is used long before the peak and soon after it, storage 2 right before the peak and long after it.
Schedule two_gaps_over_a_peak() {
  Script script({{1, 5}, {2, 5}, {3, 1}});
  for (int iteration = 0; iteration < 4; ++iteration) {
    script.op(10, {{1, true}}); // 0
    script.op(11, {{3, false}}); // 1: long
    script.op(12, {{2, true}}); // 2
    script.op(13, {}, {{101, 10}}, {101}); // 3: the peak
    script.op(14, {{3, false}}); // 4
    script.op(15, {{1, true}}); // 5
    script.op(16, {{3, false}}); // 6
    script.op(17, {{2, true}}); // 7
  }
  return timed(make_iteration(script.log(), 8), {1, 50, 1, 1, 10, 1, 20, 1});
}

/// Each storage has to leave before the other one comes: nothing overlaps.
Schedule two_weights_in_turn() {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, true}});
    script.op(11, {{2, true}});
  }
  Schedule schedule = timed(make_iteration(script.log(), 2), {1, 1});
  choose_evictions(schedule, options(8), 8);
  place_fetches(schedule, 8);
  return schedule;
}

/// A policy, and a loop over three weights of which two fit.
class Loop {
 public:
  explicit Loop(const PolicyOptions& options) : policy(options) {}

  /// \param ms of each operator; 0: not reported
  void iterate(double ms) {
    for (StorageId weight = 1; weight <= 3; ++weight) {
      if (policy.operators() < 3) {
        policy.created(weight, 8);
      }
      const Access access{weight, true};
      const Decision& begun = policy.begin(weight, {&access, 1}, false);
      wants_durations = begun.wants_durations;
      policy.end({}, 0);
      if (ms > 0) {
        policy.ran(policy.operators(), ms);
      }
    }
  }
  /// Iterates until the policy has a schedule.
  void settle() {
    for (int iteration = 0; iteration < 20 && !policy.counters().following; ++iteration) {
      iterate(0);
    }
  }
  float ms_of(std::uint32_t op) const {
    return policy.schedule().first->iteration.ops[op].ms;
  }

  Policy policy;
  bool wants_durations = false; ///< at the latest operator
};

} // namespace

TEST(a_prediction_adds_up_what_cannot_overlap) {
  Schedule schedule = two_weights_in_turn();
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 8), 34.0); // twice: run 1, write back 8, fetch 8
  CHECK_EQ(predict_ms(schedule, script::ideal(2, 1, 1), 8), 26.0); // the link to the device is twice as fast
}

/// One weight stays. Of the other two, one can be fetched behind an operator; for the other there is no room earlier.
TEST(a_prediction_hides_a_transfer_if_there_is_room_for_it) {
  Script script({{1, 8}, {2, 8}, {3, 8}});
  for (int iteration = 0; iteration < 8; ++iteration) {
    for (StorageId weight = 1; weight <= 3; ++weight) {
      script.op(weight, {{weight, false}});
    }
  }
  Schedule schedule = timed(make_iteration(script.log(), 3), {20, 20, 20});
  choose_evictions(schedule, options(16), 16);
  place_fetches(schedule, 16);
  CHECK(!schedule.fetches.empty());
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 16), 68.0);
}

TEST(a_use_in_place_takes_at_least_as_long_as_its_bytes_need) {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, true}});
    script.op(11, {{1, true}, {2, true}}, {}, {}, /*in_place_ok=*/true);
  }
  Schedule schedule = timed(make_iteration(script.log(), 2), {1, 2});
  choose_evictions(schedule, options(8), 8);
  place_fetches(schedule, 8);
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 8), 9.0);
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 8), 8), 3.0);
}

TEST(what_finds_no_room_is_predicted_to_take_for_ever) {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, true}, {2, true}});
    script.op(11, {{1, false}});
  }
  Schedule schedule = timed(make_iteration(script.log(), 2), {1, 1});
  choose_evictions(schedule, options(8), 8);
  place_fetches(schedule, 8);
  CHECK(std::isinf(predict_ms(schedule, script::ideal(1, 1, 1), 8)));
}

TEST(evictions_in_time_take_a_gap_that_hides_both_transfers) {
  for (const GapRule rule : {GapRule::kMostExcess, GapRule::kFewest}) {
    Schedule schedule = two_gaps_over_a_peak();
    choose_evictions_in_time(schedule, options(16), 16, rule);
    CHECK_EQ(evictions(schedule), "0:1");
    place_fetches(schedule, 16, latest_fetches(schedule, {1, 1, 1}));
    CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 16), 85.0); // as in core
  }
  Schedule by_order = two_gaps_over_a_peak();
  choose_evictions(by_order, options(16), 16);
  CHECK_EQ(evictions(by_order), "2:2"); // its next use is farthest, but the peak waits for its write-back
  place_fetches(by_order, 16);
  CHECK_EQ(predict_ms(by_order, script::ideal(1, 1, 1), 16), 90.0);
}

/// A transfer of one storage takes the host as long as one of another, however large they are.
TEST(one_large_storage_leaves_rather_than_many_small_ones) {
  Script script({{1, 8}, {2, 2}, {3, 2}, {4, 2}, {5, 2}, {6, 1}});
  for (int iteration = 0; iteration < 4; ++iteration) {
    script.op(10, {{2, true}, {3, true}, {4, true}, {5, true}}); // 0: as long before the peak as storage 1
    script.op(11, {{1, true}}); // 1
    script.op(12, {{6, false}}); // 2: long
    script.op(13, {}, {{101, 8}}, {101}); // 3: the peak
    script.op(14, {{6, false}}); // 4: long
    script.op(15, {{2, true}, {3, true}, {4, true}, {5, true}}); // 5
    script.op(16, {{1, true}}); // 6
  }
  for (const auto& [host_ms, expected] : {std::pair{0.0, "0:2 0:3 0:4 0:5"}, std::pair{10.0, "1:1"}}) {
    Schedule schedule = timed(make_iteration(script.log(), 7), {1, 1, 50, 1, 50, 1, 1});
    PolicyOptions given = options(17);
    given.rates.host_ms = host_ms;
    choose_evictions_in_time(schedule, given, 17, GapRule::kMostExcess);
    CHECK_EQ(evictions(schedule), expected);
  }
}

/// The host queues the next operator only once it has started the transfers of the one before.
TEST(transfers_delay_a_program_whose_host_is_late) {
  Schedule schedule = two_weights_in_turn();
  const LinkRates rates{8, 8, 8, 16, /*host_ms=*/5, /*slowed=*/0}; // an iteration has two fetches and two write-backs
  CHECK_EQ(predict_ms(schedule, rates, 8), 20.0); // queueing the operators takes no time
  for (Iteration::Op& op : schedule.iteration.ops) {
    op.host_ms = 20;
  }
  CHECK_EQ(predict_ms(schedule, rates, 8), 60.0);
}

/// It queues nothing while it waits, so what both take adds up.
TEST(a_program_that_reads_results_pays_for_host_and_device) {
  Schedule schedule = two_weights_in_turn();
  for (Iteration::Op& op : schedule.iteration.ops) {
    op.host_ms = 20;
    op.ms = 30;
  }
  CHECK_EQ(predict_ms(schedule, script::ideal(8, 8, 8), 8),
           82.0); // 20, and twice 30 and the part of copies that is not hidden, 1
  for (Iteration::Op& op : schedule.iteration.ops) {
    op.waits = true;
  }
  CHECK_EQ(predict_ms(schedule, script::ideal(8, 8, 8), 8), 100.0); // twice 20 and 30, beside which all is hidden
}

/// Fetched and written back, each of the small ones would take the host as long as the large one.
TEST(small_optimizer_state_stays_on_the_host_and_the_large_activation_leaves) {
  const std::size_t large = std::size_t{64} << 20, small = std::size_t{1} << 20;
  Script script({{1, small}, {2, small}, {3, small}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{3, false}}, {{101, large}});
    script.op(11, {{3, false}}, {{102, large}}, {102}); // the peak
    script.op(12, {{101, false}}, {}, {101});
    script.op(13, {{1, true}, {2, true}}, {}, {}, /*in_place_ok=*/true);
  }
  Schedule schedule = timed(make_iteration(script.log(), 4), {1, 1, 1, 1});
  PolicyOptions given = options(large);
  given.rates.host_ms = 2 * small; // of one byte a millisecond
  choose_evictions_in_time(schedule, given, large, GapRule::kFewest);
  CHECK_EQ(std::ranges::count(schedule.in_place, true), 2);
  unsigned leaves = 0;
  for (std::uint32_t use = 0; use < schedule.iteration.uses.size(); ++use) {
    const Value& value = schedule.iteration.values[schedule.iteration.uses[use].value];
    leaves += schedule.evicted_after[use] && value.bytes == large;
  }
  CHECK_EQ(leaves, 1U);
}

TEST(evictions_share_the_link) {
  Script script({{1, 8}, {2, 8}, {3, 8}, {6, 1}});
  for (int iteration = 0; iteration < 4; ++iteration) {
    script.op(10, {{1, true}, {2, true}}); // 0
    script.op(11, {{6, false}}); // 1: long enough for one write-back
    script.op(12, {}, {{101, 16}}, {101}); // 2: the peak
    script.op(11, {{6, false}}); // 3: long
    script.op(13, {{1, true}, {2, true}, {3, true}}); // 4
    script.op(11, {{6, false}}); // 5: long
  }
  Schedule schedule = timed(make_iteration(script.log(), 6), {1, 12, 1, 24, 1, 24});
  choose_evictions_in_time(schedule, options(25), 25, GapRule::kMostExcess);
  CHECK_EQ(evictions(schedule), "0:1 4:3"); // without a share of the link it would be 0:1 0:2
}

TEST(the_shortest_prediction_is_followed) {
  Schedule schedule = two_gaps_over_a_peak();
  choose_fastest(schedule, options(16));
  CHECK_EQ(schedule.predicted_ms, 85.0); // by order it would be 90
  CHECK_EQ(evictions(schedule) == "2:2", false);
}

TEST(optimizer_state_that_cannot_be_fetched_in_time_is_used_in_place) {
  Script script({{1, 8}, {2, 8}, {3, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, false}});
    script.op(11, {{1, true}, {2, true}, {3, true}}, {}, {}, /*in_place_ok=*/true);
  }
  Schedule schedule = timed(make_iteration(script.log(), 2), {100, 1});
  choose_evictions_in_time(schedule, options(16), 16, GapRule::kMostExcess);
  for (std::uint32_t use = 0; use < schedule.iteration.uses.size(); ++use) {
    CHECK(!schedule.in_place[use] || schedule.iteration.uses[use].op == 1);
  }
  CHECK_EQ(std::ranges::count(schedule.in_place, true), 1);
  place_fetches(schedule, 16, latest_fetches(schedule, {1, 1, 1}));
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 16), 108.0);
}

/// A list of tensors that fills the budget, and results of the same size, as in AdamW without fused=True.
TEST(operands_leave_the_device_for_results_that_find_no_room_beside_them) {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, true}, {2, true}}, {}, {}, /*in_place_ok=*/true);
    script.op(11, {{1, false}, {2, false}}, {{101, 8}, {102, 8}}, {}, /*in_place_ok=*/true);
    script.op(12, {{101, false}, {102, false}}, {}, {101, 102}, /*in_place_ok=*/true);
  }
  for (const std::size_t capacity : {16U, 24U}) {
    Schedule schedule = timed(make_iteration(script.log(), 3), {1, 1, 1});
    choose_fastest(schedule, options(capacity));
    CHECK(std::isfinite(schedule.predicted_ms));
    choose_evictions(schedule, options(capacity), capacity);
    for (const std::size_t bytes : base_usage(schedule)) {
      CHECK(bytes <= capacity);
    }
  }
}

/// Gradients after their last use, until `zero_grad`.
TEST(what_is_only_freed_leaves_the_device_for_what_finds_no_room_beside_it) {
  Script script(std::map<StorageId, std::size_t>{{1, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, false}}, {{101, 8}});
    script.op(11, {{1, true}}, {{102, 8}});
    script.op(12, {{1, true}, {102, false}}, {}, {101, 102});
  }
  for (const GapRule rule : {GapRule::kMostExcess, GapRule::kFewest}) {
    Schedule schedule = timed(make_iteration(script.log(), 3), {1, 1, 1});
    choose_evictions_in_time(schedule, options(16), 16, rule);
    place_fetches(schedule, 16, latest_fetches(schedule, {1, 1, 1}));
    CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 16), 11.0); // operators 3, and a write-back of 8
  }
}

TEST(a_pinned_storage_is_not_evicted_in_time) {
  Schedule schedule = two_gaps_over_a_peak();
  schedule.iteration.values[*schedule.iteration.value_of.find(1)].pinned = true;
  choose_evictions_in_time(schedule, options(16), 11, GapRule::kFewest);
  CHECK_EQ(evictions(schedule), "2:2");
}

TEST(fetches_are_as_late_as_the_link_allows) {
  Script script({{1, 4}, {2, 12}, {3, 1}});
  for (int iteration = 0; iteration < 4; ++iteration) {
    script.op(10, {{1, false}, {2, false}}); // 0
    script.op(11, {{3, false}}); // 1
    script.op(12, {{3, false}}); // 2
    script.op(13, {{3, false}}); // 3
    script.op(14, {{1, false}}); // 4
    script.op(15, {{2, false}}); // 5
  }
  Schedule schedule = timed(make_iteration(script.log(), 6), {10, 10, 10, 10, 10, 10});
  schedule.in_place.assign(schedule.iteration.uses.size(), false);
  schedule.evicted_after.assign(schedule.iteration.uses.size(), false);
  schedule.evicted_after[0] = schedule.evicted_after[1] = true; // both, after operator 0
  const std::vector<std::uint32_t> ahead = latest_fetches(schedule, {1, 1, 1});
  CHECK_EQ(ahead[1], 2U); // needed at 50 ms, so from 38 on: after operator 2
  CHECK_EQ(ahead[0], 1U); // needed at 40 ms, but the link is taken from 38 on: from 34 on, after operator 2
}

TEST(a_policy_asks_for_each_operators_duration_twice) {
  Loop loop(options(16));
  loop.settle();
  CHECK(loop.wants_durations);
  loop.iterate(30);
  CHECK(loop.wants_durations);
  loop.iterate(20);
  loop.iterate(0);
  CHECK(!loop.wants_durations);
  CHECK_EQ(loop.ms_of(1), 20.0F); // the shorter one
}

TEST(an_operator_that_used_operands_in_place_counts_as_fast_as_the_others) {
  Policy policy(options(16 << 20));
  policy.created(1, 8 << 20);
  policy.created(2, 24 << 20);
  for (int iteration = 0; iteration < 30; ++iteration) {
    const Access reads{1, false};
    policy.begin(10, {&reads, 1}, false);
    policy.end({}, 0);
    policy.ran(policy.operators(), 9);
    const Access both[] = {{1, true}, {2, true}};
    policy.begin(11, both, /*in_place_ok=*/true);
    policy.end({}, 0);
    policy.ran(policy.operators(), 1000);
  }
  const Schedule& schedule = *policy.schedule().first;
  for (const Iteration::Op& op : schedule.iteration.ops) {
    CHECK_EQ(op.ms, op.in_place_ok ? 33.0F : 9.0F); // by bytes, and 1 MiB for each operator
  }
}

TEST(a_policy_stops_asking_for_durations_that_do_not_come) {
  Loop loop(options(16));
  loop.settle();
  CHECK(loop.wants_durations);
  CHECK(!loop.policy.is_settled());
  for (int iteration = 0; iteration < 20; ++iteration) {
    loop.iterate(0);
  }
  CHECK(!loop.wants_durations);
  CHECK(loop.policy.is_settled());
}

TEST(a_policy_without_durations_asks_for_none) {
  PolicyOptions untimed = options(16);
  untimed.timed = false;
  Loop loop(untimed);
  for (int iteration = 0; iteration < 8; ++iteration) {
    loop.iterate(0);
    CHECK(!loop.wants_durations);
  }
}

TEST(durations_of_operators_that_no_schedule_had_are_ignored) {
  Loop loop(options(16));
  loop.settle();
  loop.policy.ran(1, 1000); // before the schedule was made
  loop.iterate(5);
  loop.iterate(5);
  CHECK_EQ(loop.ms_of(0), 5.0F);
}

HARNESS_MAIN()
