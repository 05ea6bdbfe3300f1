// The policy under changing programs: evaluation between steps, alternating models, new shapes, branches, random
// programs.
#include <random>
#include <string>
#include <vector>

#include "policy_rig.h"

using namespace simulator;

TEST(evaluation_between_steps_keeps_the_schedule) {
  const Transformer model = small();
  Simulator simulator(with_budget(peak_of(model) / 2));
  model.declare(simulator);
  HitCounter hits(simulator.policy());
  for (int at = 0; at < 5; ++at) {
    simulator.run(model.step());
  }
  for (int at = 0; at < 8; ++at) {
    simulator.run(model.evaluation());
  }
  for (const int steps : {3, 1, 4, 2}) {
    hits.take();
    for (int at = 0; at < steps; ++at) {
      simulator.run(model.step());
    }
    simulator.run(model.evaluation());
    simulator.run(model.evaluation());
    const Hits since = hits.take();
    CHECK(since.misses <= 16); // a few operators to resynchronise, twice
    CHECK(since.hits > 10 * since.misses);
  }
}

TEST(alternating_models_each_have_a_schedule) {
  const Transformer one = small("a_"), other = small("b_");
  Simulator simulator(with_budget(peak_of(one) / 2));
  one.declare(simulator);
  other.declare(simulator);
  for (int at = 0; at < 5; ++at) {
    simulator.run(one.step());
  }
  for (int at = 0; at < 5; ++at) {
    simulator.run(other.step());
  }
  HitCounter hits(simulator.policy());
  hits.take();
  std::mt19937 random(5);
  for (int at = 0; at < 20; ++at) {
    simulator.run((random() % 2 == 0 ? one : other).step());
  }
  const Hits since = hits.take();
  CHECK(since.misses <= 20 * 8);
  CHECK(since.hits > 10 * since.misses);
}

/// Models that never run twice in a row are recognised by the marks between steps.
TEST(marks_distinguish_steps_that_never_repeat_in_a_row) {
  const Transformer models[] = {small("a_"), small("b_"), small("c_")};
  Simulator simulator(with_budget(peak_of(models[0]) / 2));
  for (const Transformer& model : models) {
    model.declare(simulator);
  }
  std::mt19937 random(6);
  int last = 0;
  HitCounter hits(simulator.policy());
  for (int at = 0; at < 40; ++at) {
    if (at == 24) {
      hits.take();
    }
    last = (last + 1 + static_cast<int>(random() % 2)) % 3;
    simulator.run(models[last].step());
  }
  const Hits since = hits.take();
  CHECK(since.hits > 4 * since.misses);
}

TEST(shapes_that_change_each_step_do_not_replan_without_end) {
  Transformer model = small();
  Simulator simulator(with_budget(peak_of(model) / 2));
  model.declare(simulator);
  std::mt19937 random(7);
  for (int at = 0; at < 40; ++at) {
    model.tokens = 1024 + 64 * (random() % 48);
    simulator.run(model.step());
  }
  const Policy::Counters counters = simulator.policy().counters();
  CHECK(counters.schedules_made <= 6);
  // The order is the same for all sizes, so next uses are known.
  CHECK(counters.plan_hits > counters.plan_misses);
}

TEST(lasting_new_sizes_get_a_new_schedule) {
  Transformer model = small();
  const std::size_t budget = peak_of(model) / 2;
  Simulator simulator(with_budget(budget));
  model.declare(simulator);
  for (int at = 0; at < 6; ++at) {
    simulator.run(model.step());
  }
  const std::uint64_t plans = simulator.policy().counters().schedules_made;
  model.tokens *= 2;
  for (int at = 0; at < 6; ++at) {
    simulator.run(model.step());
  }
  CHECK_EQ(simulator.policy().counters().schedules_made, plans + 1);
  simulator.take_counts();
  simulator.run(model.step());
  CHECK_EQ(simulator.take_counts().on_demand, 0U);
}

TEST(branches_mismatch_and_the_rest_matches) {
  const Transformer model = small();
  Simulator simulator(with_budget(peak_of(model) / 2));
  model.declare(simulator);
  std::mt19937 random(8);
  HitCounter hits(simulator.policy());
  for (int at = 0; at < 40; ++at) {
    if (at == 20) {
      hits.take();
    }
    Program step = model.step();
    if (at >= 6 && random() % 2 == 0) { // a branch: the program reads a value
      const Op extra{"item", {{model.at("qkv", 3)}}, {{"scratch", 512}}, {"scratch"}, 0, false, 0.1};
      step.insert(step.begin() + 30, 1 + static_cast<int>(random() % 3), extra);
    }
    simulator.run(step);
  }
  const Hits since = hits.take();
  CHECK(since.hits > 30 * since.misses);
}

/// Random programs: every decision can be carried out, and none exceeds the budget.
TEST(random_programs_stay_within_the_budget) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    const std::size_t budget = 1 << 20;
    Simulator simulator(with_budget(budget, random() % (budget / 4)));
    std::vector<std::string> names;
    for (int at = 0; at < 12; ++at) {
      names.push_back("p" + std::to_string(at));
      simulator.declare(names.back(), 1 + random() % (budget / 6));
    }
    const unsigned period = 1 + random() % 60;
    Program iteration;
    for (unsigned at = 0; at < period; ++at) {
      Op op{"op" + std::to_string(random() % 5), {}, {}, {}, random() % 1000, random() % 4 == 0, 0.01};
      for (unsigned use = 0; use <= random() % 3; ++use) {
        op.uses.push_back({names[random() % names.size()], random() % 3 == 0});
      }
      if (random() % 2 == 0) {
        op.births.push_back({"t" + std::to_string(at), 1 + random() % (budget / 8)});
        op.deaths.push_back(op.births.back().first);
      }
      iteration.push_back(op);
    }
    for (int at = 0; at < 12; ++at) {
      Program step = iteration;
      if (random() % 3 == 0) {
        step.erase(step.begin() + static_cast<std::ptrdiff_t>(random() % step.size()));
      }
      if (at == 8) {
        simulator.policy().set_options(with_budget(budget, budget / 8));
      }
      simulator.run(step);
    }
    const Simulator::Counts counts = simulator.take_counts();
    CHECK_EQ(counts.over, 0U);
    CHECK(counts.peak <= budget);
  }
}

HARNESS_MAIN()
