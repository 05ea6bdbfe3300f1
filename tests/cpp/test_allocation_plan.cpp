// Iterations with and without a matching allocation plan: other sizes, other orders, other streams.
#include <algorithm>
#include <cstddef>
#include <random>
#include <vector>

#include "plan_rig.h"

using namespace plans;

TEST(a_planned_iteration_makes_no_runtime_call) {
  PlanRig rig;
  const std::vector<PlanRequest> step = steps::ragged(20);
  rig.iterate_step(step); // the recorded iteration
  CHECK_EQ(rig.report().plans, 1);
  CHECK_EQ(rig.report().hits, 0);
  const std::int64_t recorded = rig.taken();
  CHECK_EQ(recorded, static_cast<std::int64_t>(step.size()));
  rig.iterate_step(step); // allocates the segment
  CHECK_EQ(rig.taken(), recorded + 1);
  rig.runtime.clear_calls();
  for (int i = 0; i < 5; ++i) {
    rig.iterate_step(step);
  }
  CHECK_EQ(rig.taken(), recorded + 1);
  CHECK_EQ(rig.runtime.calls().size(), std::size_t{0});
  const PlanReport report = rig.report();
  CHECK_EQ(report.iterations, 7);
  CHECK_EQ(report.plans, 1);
  CHECK_EQ(report.hits, static_cast<std::int64_t>(6 * step.size()));
  CHECK_EQ(report.misses, 0);
  CHECK_EQ(rig.plan->figures().reserved_bytes, static_cast<std::int64_t>(report.planned_bytes));
  rig.close();
}

TEST(the_report_contains_the_layout) {
  PlanRig rig;
  std::vector<PlanRequest> step = {
      {1000, 0, 2, kStream}, {3000, 1, 3, kStream}, {500, 4, kNoEnd, kStream}, {900, 5, 6, kStream}};
  rig.iterate_step(step);
  const PlanReport report = rig.report();
  CHECK_EQ(report.requests, std::size_t{4});
  CHECK_EQ(report.planned_requests, std::size_t{3});
  CHECK_EQ(report.peak_live_bytes, std::size_t{4000});
  CHECK_EQ(report.planned_bytes, std::size_t{1024 + 3072});
  CHECK_EQ(report.layout.size(), std::size_t{4});
  for (std::size_t i = 0; i < 4; ++i) {
    CHECK_EQ(report.layout[i].bytes, step[i].bytes);
    CHECK_EQ(report.layout[i].begin, step[i].begin);
    CHECK_EQ(report.layout[i].end, step[i].end);
    CHECK_EQ(report.layout[i].apart, i == 2);
    CHECK(report.layout[i].offset + report.layout[i].bytes <= report.planned_bytes);
  }
  rig.close();
}

TEST(addresses_match_the_reported_layout) {
  PlanRig rig;
  rig.iterate({1000, 3 * MiB, 50});
  const PlanReport report = rig.report();
  rig.plan->begin_iteration();
  std::vector<Allocation> held;
  for (const PlannedRequest& planned : report.layout) {
    held.push_back(rig.allocate(planned.bytes));
    CHECK_EQ(static_cast<char*>(held.back().ptr) - static_cast<char*>(held.front().ptr),
             static_cast<std::ptrdiff_t>(planned.offset) - static_cast<std::ptrdiff_t>(report.layout[0].offset));
  }
  std::ranges::for_each(held, [&](const Allocation& allocation) { rig.free(allocation); });
  rig.plan->end_iteration();
  rig.close();
}

TEST(a_changed_size_misses_and_enters_the_next_plan) {
  PlanRig rig;
  rig.iterate({1000, 2000, 3000, 4000});
  rig.iterate({1000, 2000, 3000, 4000});
  rig.iterate({1000, 2001, 3000, 4000}); // one size differs
  CHECK_EQ(rig.report().misses, 1);
  CHECK_EQ(rig.report().hits, 4 + 3);
  CHECK_EQ(rig.report().plans, 2);
  rig.iterate({1000, 2001, 3000, 4000});
  CHECK_EQ(rig.report().misses, 1);
  CHECK_EQ(rig.report().hits, 4 + 3 + 4);
  rig.close();
}

TEST(an_added_or_missing_request_causes_one_miss) {
  PlanRig rig;
  const std::vector<std::size_t> sizes = {1000, 2000, 3000, 4000, 5000, 6000};
  rig.iterate(sizes);
  rig.iterate({1000, 2000, 700, 3000, 4000, 5000, 6000}); // one more request
  CHECK_EQ(rig.report().misses, 1);
  CHECK_EQ(rig.report().hits, 6);
  rig.iterate({1000, 2000, 700, 4000, 5000, 6000}); // one request fewer
  CHECK_EQ(rig.report().misses, 1);
  CHECK_EQ(rig.report().hits, 12);
  CHECK_EQ(rig.report().plans, 2); // the plan has every request
  rig.iterate({1000, 2000, 700, 3000, 4000, 5000, 6000, 8000}); // one more request at the end
  CHECK_EQ(rig.report().misses, 2);
  CHECK_EQ(rig.report().plans, 3);
  rig.iterate({1000, 2000}); // only the first requests
  CHECK_EQ(rig.report().misses, 2);
  CHECK_EQ(rig.report().plans, 3);
  rig.iterate({1000, 2000, 700, 3000, 4000, 5000, 6000, 8000});
  CHECK_EQ(rig.report().misses, 2);
  rig.close();
}

TEST(reordered_requests_still_match) {
  PlanRig rig;
  rig.iterate({1000, 2000, 3000, 4000});
  rig.iterate({2000, 1000, 4000, 3000});
  CHECK_EQ(rig.report().misses, 0); // all live at once: each has an address of its own
  CHECK_EQ(rig.report().hits, 4);
  rig.close();
}

TEST(a_request_on_another_stream_or_home_misses) {
  PlanRig rig;
  const Stream other = rig.stream();
  rig.iterate({1000, 2000, 3000});
  rig.iterate({1000, 2000, 3000});
  rig.iterate([&] {
    const Allocation a = rig.allocate(1000);
    const Allocation b = rig.allocate(2000, other);
    const Allocation c = rig.plan->allocate(3000, Location::host(), Stream::host());
    const Allocation d = rig.allocate(3000);
    CHECK(!overlap(a, b) && !overlap(a, c) && !overlap(b, d) && !overlap(c, d));
    for (const Allocation& allocation : {a, b, c, d}) {
      fill(allocation, 3);
      rig.free(allocation);
    }
  });
  CHECK_EQ(rig.report().misses, 1); // the plan does not serve the host
  CHECK_EQ(rig.report().requests, std::size_t{3});
  CHECK_EQ(rig.report().plans, 2);
  rig.close();
}

TEST(frees_may_come_in_another_order) {
  PlanRig rig;
  const auto iteration = [&](bool swapped) {
    rig.iterate([&] {
      const Allocation a = rig.allocate(1000), b = rig.allocate(2000);
      rig.free(swapped ? b : a);
      rig.free(swapped ? a : b);
      rig.free(rig.allocate(3000));
    });
  };
  iteration(false);
  iteration(true);
  iteration(false);
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().hits, 6);
  CHECK_EQ(rig.report().plans, 1);
  rig.close();
}

TEST(plans_that_never_match_are_made_ever_more_rarely) {
  PlanRig rig;
  for (std::size_t i = 0; i < 200; ++i) { // two alternating patterns: each plan is wrong for the next iteration
    rig.iterate(i % 2 == 0 ? std::vector<std::size_t>{1000, 2000, 3000} : std::vector<std::size_t>{1500, 2500});
  }
  CHECK(rig.report().plans >= 4 && rig.report().plans <= 16);
  for (int i = 0; i < 130; ++i) {
    rig.iterate({1000, 2000, 3000});
  }
  const std::int64_t misses = rig.report().misses;
  rig.iterate({1000, 2000, 3000});
  CHECK_EQ(rig.report().misses, misses); // from now on the plan matches
  rig.close();
}

TEST(randomly_changing_steps_never_lose_bytes) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    PlanRig rig;
    std::mt19937_64 random(seed);
    std::vector<PlanRequest> step = steps::ragged(4);
    for (PlanRequest& request : step) {
      request.bytes = 1 + request.bytes / 64;
    }
    for (int i = 0; i < 30; ++i) {
      rig.iterate_step(step);
      switch (random() % 4) {
        case 0: // another size
          step[random() % step.size()].bytes += 1000;
          break;
        case 1: // one request fewer
          step.erase(step.begin() + static_cast<std::ptrdiff_t>(random() % step.size()));
          break;
        case 2: // one request lives longer, or past the end
          step[random() % step.size()].end += random() % 2 == 0 ? 20 : kNoEnd - 1'000'000'000;
          for (PlanRequest& request : step) {
            request.end = request.end > 1'000'000'000 ? kNoEnd : request.end;
          }
          break;
        default: // unchanged
          break;
      }
    }
    CHECK(rig.report().hits > 10 * rig.report().misses);
    rig.close();
  }
}

HARNESS_MAIN()
