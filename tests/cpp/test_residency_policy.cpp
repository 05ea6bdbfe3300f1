// The residency policy, called operator by operator: recognition of steps, next uses, predicted outputs, the cost of a
// call.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <utility>
#include <vector>

#include "policy_rig.h"
#include "residency/engine/loops.h"
#include "residency/policy/schedule.h"

using namespace simulator;
using namespace torch_uvm;

TEST(without_a_schedule_nothing_is_fetched) {
  Policy policy(with_budget(100));
  policy.created(1, 10);
  policy.created(2, 10);
  const std::vector<Access> first = {{1, false}}, second = {{2, true}, {2, false}};
  policy.begin(7, first, false);
  const std::vector<std::pair<StorageId, std::size_t>> births = {{3, 10}};
  const Decision& after = policy.end(births, 0);
  CHECK(after.fetch.empty() && after.retire.empty() && !after.forget);
  policy.begin(8, second, true);
  CHECK(std::isinf(policy.next_use(1)));
  CHECK(std::isinf(policy.next_use(99)));
  CHECK(policy.use_in_place(2));
  CHECK(!policy.use_in_place(1)); // not an operand of the running operator
  policy.end({}, 0);
  policy.freed(3);
  CHECK_EQ(policy.counters().plan_misses, 2U);
  CHECK(!policy.counters().following);
}

/// Layers that look alike. Each parameter is first seen when its layer runs (inference).
TEST(layers_seen_for_the_first_time_are_not_steps) {
  constexpr StorageId kLayers = 24;
  Policy policy(with_budget(1000));
  for (int iteration = 0; iteration < 4; ++iteration) {
    for (StorageId layer = 1; layer <= kLayers; ++layer) {
      for (const StorageId weight : {2 * layer, 2 * layer + 1}) {
        policy.created(weight, 10); // known already in later iterations
        policy.begin(weight % 2 + 7, std::vector<Access>{{weight, false}}, false);
        policy.end({}, 0);
      }
      CHECK(iteration != 0 || policy.step_length() == 0);
    }
  }
  CHECK_EQ(policy.step_length(), 2 * kLayers);
  CHECK_EQ(policy.next_use(2), 1.0);
}

/// The batch of each step is a new storage that no operator made. The previous batch is freed.
TEST(steps_with_new_batches_are_recognised) {
  Policy policy(with_budget(1000));
  policy.created(1, 10);
  policy.created(2, 10);
  for (StorageId batch = 100; batch < 120; ++batch) {
    policy.created(batch, 10);
    policy.begin(7, std::vector<Access>{{batch, false}, {1, false}}, false);
    policy.end({}, 0);
    policy.begin(8, std::vector<Access>{{batch, false}, {2, false}}, false);
    policy.end({}, 0);
    policy.freed(batch);
  }
  CHECK_EQ(policy.step_length(), 2U);
}

/// A recurrent state: each step makes the next one, and its backward reads the one that it got.
TEST(steps_that_hand_on_a_state_are_followed) {
  Policy policy(with_budget(1000));
  policy.created(1, 100);
  StorageId state = 2;
  policy.created(state, 1);
  HitCounter count(policy);
  for (int step = 0; step < 16; ++step) {
    policy.begin(1, std::vector<Access>{{1, false}, {state, false}}, false);
    policy.end(std::vector<std::pair<StorageId, std::size_t>>{{state + 1, 1}}, 0);
    policy.begin(2, std::vector<Access>{{1, true}, {state, false}}, false);
    policy.end({}, 0);
    policy.freed(state++);
    policy.begin(3, std::vector<Access>{{1, true}}, false);
    policy.end({}, 0);
    policy.mark_step();
    const Hits hits = count.take();
    CHECK(step < 12 || (hits.hits == 3 && hits.misses == 0));
  }
}

TEST(outputs_are_predicted_at_the_begin_of_an_operator) {
  Policy policy(with_budget(1000));
  policy.created(1, 10);
  const std::vector<Access> weight = {{1, false}};
  StorageId next = 2;
  const auto step = [&](std::size_t third) {
    std::vector<std::vector<std::size_t>> told;
    for (const std::vector<std::size_t>& sizes : {std::vector<std::size_t>{30, 7}, {}, {third}}) {
      const Decision& before = policy.begin(told.size() + 1, weight, false);
      told.push_back(before.births);
      std::vector<std::pair<StorageId, std::size_t>> births;
      for (const std::size_t bytes : sizes) {
        births.emplace_back(next++, bytes);
      }
      CHECK(policy.end(births, 0).births.empty());
      for (const auto& [id, bytes] : births) {
        policy.freed(id);
      }
    }
    policy.mark_step();
    return told;
  };
  CHECK(step(5) == std::vector<std::vector<std::size_t>>(3)); // no schedule yet
  for (int number = 0; number < 4; ++number) {
    step(5);
  }
  CHECK(step(5) == (std::vector<std::vector<std::size_t>>{{30, 7}, {}, {5}}));
}

/// As `optimizer.step()` marks a step, and `zero_grad()` frees the gradients after it.
TEST(a_schedule_knows_what_is_freed_after_the_step_mark) {
  Policy policy(with_budget(1000));
  policy.created(1, 100);
  StorageId gradient = 2;
  for (int step = 0; step < 3; ++step) {
    policy.begin(1, std::vector<Access>{{1, false}}, false);
    policy.end(std::vector<std::pair<StorageId, std::size_t>>{{gradient, 100}}, 0);
    policy.begin(2, std::vector<Access>{{1, true}, {gradient, false}}, false);
    policy.end({}, 0);
    policy.mark_step();
    policy.freed(gradient++);
  }
  policy.begin(1, std::vector<Access>{{1, false}}, false);
  const torch_uvm::scheduling::Schedule* const schedule = policy.schedule().first;
  CHECK(schedule != nullptr && schedule->iteration.size() == 2);
  for (const auto& value : schedule->iteration.values) { // the parameter, the gradient
    CHECK_EQ(value.created_at == torch_uvm::scheduling::kNone, value.freed_at == torch_uvm::scheduling::kNone);
  }
}

TEST(next_use_counts_operators_around_the_step) {
  Policy policy(with_budget(1000));
  for (StorageId storage = 1; storage <= 4; ++storage) {
    policy.created(storage, 10);
  }
  for (int iteration = 0; iteration < 10; ++iteration) {
    for (StorageId storage = 1; storage <= 4; ++storage) {
      const std::vector<Access> accesses = {{storage, false}};
      policy.begin(storage, accesses, false);
      policy.end({}, 0);
    }
  }
  const std::vector<Access> accesses = {{1, false}};
  policy.begin(1, accesses, false);
  CHECK(policy.counters().following);
  CHECK_EQ(policy.next_use(1), 4.0);
  CHECK_EQ(policy.next_use(2), 1.0);
  CHECK_EQ(policy.next_use(4), 3.0);
}

/// The cost of a call must not grow with the step or with the number of live storages. The times are only printed,
/// because they depend on other load.
TEST(the_cost_of_a_call_does_not_depend_on_the_step) {
  for (const std::size_t operators : {std::size_t{1000}, std::size_t{10000}, std::size_t{100000}}) {
    Policy policy(with_budget(operators * 1000 / 4));
    const std::size_t parameters = operators / 10;
    for (StorageId storage = 1; storage <= parameters; ++storage) {
      policy.created(storage, 4096);
    }
    StorageId next = parameters + 1;
    double ns = 0, slowest = 0;
    const int iterations = 6;
    for (int iteration = 0; iteration < iterations; ++iteration) {
      std::vector<StorageId> saved;
      const auto begin = std::chrono::steady_clock::now();
      for (std::size_t op = 0; op < operators; ++op) {
        const auto before = std::chrono::steady_clock::now();
        const std::size_t layer = op < operators / 2 ? op / 5 : (operators - 1 - op) / 5;
        const StorageId parameter = 1 + layer % parameters;
        Access accesses[3] = {{parameter, op % 50 == 0}, {parameter, false}, {parameter, false}};
        std::size_t count = 1;
        if (op < operators / 2) {
          if (!saved.empty()) {
            accesses[count++] = {saved.back(), false};
          }
        } else {
          accesses[count++] = {saved.back(), false};
        }
        policy.begin(op % 7, {accesses, count}, false);
        const std::pair<StorageId, std::size_t> births[1] = {{next, 2048}};
        if (op < operators / 2) {
          saved.push_back(next++);
          policy.end(births, 128);
        } else {
          policy.end({}, 128);
          policy.freed(saved.back());
          saved.pop_back();
        }
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - before;
        slowest = std::max(slowest, took.count());
      }
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
      ns = took.count() / static_cast<double>(operators); // of the last iteration
    }
    std::printf("%zu operators: %.0f ns each with all calls, the slowest (a plan) %.1f ms\n", operators, ns,
                slowest / 1e3);
    const Policy::Counters counters = policy.counters();
    CHECK_EQ(counters.schedules_made, 1U);
    CHECK(counters.plan_hits >= operators);
  }
}

TEST(loops_share_a_budget_by_what_they_had_since_it_was_shared) {
  Loops loops;
  loops.start();
  PolicyOptions options;
  options.budget = 120;
  loops.set_options(options);
  const Thread maker = std::make_shared<int>(), user = std::make_shared<int>();
  Loops::Loop& made = loops[loops.of_thread(maker, Loops::kUnknown, false)];
  Loops::Loop& uses = loops[loops.of_thread(user, Loops::kUnknown, false)];
  const auto run = [](Loops::Loop& loop, StorageId storage) {
    const std::vector<Access> operand = {{storage, true}};
    loop.policy.begin(7, operand, false);
    loop.policy.end({}, 0);
  };
  std::uint64_t operators = 0;
  const auto run_both = [&] {
    run(made, 1);
    run(uses, 3);
    loops.share_budget(operators += 5000);
  };
  made.policy.created(1, 10);
  made.policy.created(2, 90);
  uses.policy.created(3, 50);
  run_both();
  CHECK_EQ(made.budget, 80U);
  CHECK_EQ(uses.budget, 40U);
  made.policy.freed(2); // it was there in a part of what is looked at
  run_both();
  CHECK_EQ(uses.budget, 40U);
  run_both();
  CHECK_EQ(made.budget, 120U); // all fits
  CHECK_EQ(uses.budget, 120U);
  made.policy.created(4, 200);
  loops.set_options(options);
  made.policy.freed(4);
  run(uses, 3);
  loops.share_budget(operators += 5000);
  CHECK_EQ(uses.budget, 120U); // the other has not run within this budget
}

HARNESS_MAIN()
