// Allocation plans: the suite that every Allocator passes, iterations that match and that do not, requests that outlive
// them, streams, threads, failing calls, forks.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "allocator_face.h"
#include "plan_rig.h"

using namespace face;

namespace {

std::shared_ptr<Allocator> begun(ManagedRuntime&, std::shared_ptr<Allocator> upstream) {
  auto plan = std::make_shared<AllocationPlan>(std::move(upstream), kHome);
  plan->begin_iteration();
  return plan;
}

void again(Allocator& plan) {
  static_cast<AllocationPlan&>(plan).end_iteration();
  static_cast<AllocationPlan&>(plan).begin_iteration();
}

const bool registered = register_face("plan", {.make = begun, .again = again});

} // namespace

TEST(a_planned_iteration_makes_no_runtime_call) {
  CHECK(registered);
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

TEST(the_report_has_the_layout_and_addresses_follow_it) {
  PlanRig rig;
  const std::vector<PlanRequest> step = {
      {1000, 0, 2, kStream}, {3000, 1, 3, kStream}, {500, 4, kNoEnd, kStream}, {900, 5, 6, kStream}};
  rig.iterate_step(step);
  const PlanReport report = rig.report();
  CHECK_EQ(report.requests, std::size_t{4});
  CHECK_EQ(report.planned_bytes, std::size_t{1024 + 3072});
  CHECK_EQ(report.layout.size(), std::size_t{3});
  CHECK_EQ(report.layout[2].second.begin, 5U);
  CHECK_EQ(report.layout[2].second.end, 6U);
  rig.iterate([&] {
    const Allocation a = rig.allocate(1000), b = rig.allocate(3000);
    CHECK_EQ(static_cast<char*>(a.ptr) - static_cast<char*>(b.ptr),
             static_cast<std::ptrdiff_t>(report.layout[0].first) - static_cast<std::ptrdiff_t>(report.layout[1].first));
    rig.free(a);
    rig.free(b);
  });
  rig.close();
}

TEST(other_requests_miss_and_enter_the_next_plan) {
  const std::vector<std::size_t> planned = {1000, 2000, 3000, 4000};
  for (const auto& [other, misses] : std::vector<std::pair<std::vector<std::size_t>, int>>{
           {{1000, 2001, 3000, 4000}, 1}, // another size
           {{1000, 2000, 700, 3000, 4000}, 1}, // one more request
           {{1000, 3000, 4000}, 0}, // one request fewer
           {{1000, 3000, 2000, 4000}, 1}, // another order
           {{1000, 2000}, 0}, // only the first ones
           {{1000, 2000, 3000, 4000, 8000}, 1}, // one more at the end
       }) {
    PlanRig rig;
    rig.iterate(planned);
    rig.iterate(planned);
    rig.iterate(other);
    CHECK_EQ(rig.report().misses, misses);
    CHECK_EQ(rig.report().hits, static_cast<std::int64_t>(planned.size() + other.size()) - misses);
    CHECK_EQ(rig.report().plans, 1 + misses);
    rig.iterate(other);
    CHECK_EQ(rig.report().misses, misses);
    rig.close();
  }
}

TEST(other_streams_and_homes_stay_with_the_upstream) {
  PlanRig rig;
  const Stream other = rig.stream();
  for (int i = 0; i < 3; ++i) {
    rig.iterate([&] {
      const Allocation a = rig.allocate(3000), b = rig.allocate(2000, other);
      const Allocation c = rig.plan->allocate(3000, Location::host(), Stream::host());
      for (const Allocation& allocation : {a, b, c}) {
        fill(allocation, 3);
        rig.free(allocation);
      }
    });
  }
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().hits, 4); // the plan does not serve the host
  CHECK_EQ(rig.report().layout.size(), std::size_t{1});
  rig.close();
}

TEST(frees_may_come_in_another_order) {
  PlanRig rig;
  for (const bool swapped : {false, true}) { // frees may come in another order
    rig.iterate([&] {
      const Allocation a = rig.allocate(MiB / 2), b = rig.allocate(MiB / 2);
      rig.free(swapped ? b : a);
      rig.free(swapped ? a : b);
      rig.pass(MiB);
    });
  }
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().planned_bytes, std::size_t{MiB});
  rig.close();
}

TEST(bytes_that_are_still_in_use_are_not_reused) {
  PlanRig rig;
  rig.iterate([&] {
    rig.pass(MiB);
    rig.pass(MiB);
  });
  CHECK_EQ(rig.report().planned_bytes, std::size_t{MiB});
  for (int i = 0; i < 2; ++i) {
    rig.iterate({MiB, MiB}); // the second one is allocated before the first one is freed
    CHECK_EQ(rig.report().misses, 1); // in the first of these iterations only
  }
  CHECK_EQ(rig.report().planned_bytes, std::size_t{2 * MiB});
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
    CHECK(rig.report().hits > 5 * rig.report().misses);
    rig.close();
  }
}

// --- lifetimes ----------------------------------------------------------------------------------------------------

TEST(a_planned_request_that_outlives_keeps_its_bytes_and_leaves_the_plan) {
  PlanRig rig;
  rig.iterate({1000, 2000});
  std::vector<Allocation> kept;
  for (int i = 0; i < 6; ++i) {
    rig.iterate([&] {
      rig.pass(1000);
      kept.push_back(rig.allocate(2000));
      fill(kept.back(), static_cast<unsigned char>(i));
      if (i % 2 == 1) { // it only sometimes outlives: plans must not alternate
        rig.free(std::exchange(kept.back(), {}));
      }
    });
    CHECK_EQ(rig.report().outlived, 1); // in the first of these iterations; afterwards the upstream serves the request
  }
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().plans, 2);
  const std::int64_t reserved = rig.plan->figures().reserved_bytes;
  for (const std::size_t i : {0, 2, 4}) {
    expect_filled(kept[i], static_cast<unsigned char>(i));
    rig.free(kept[i]);
    CHECK(i > 0 || rig.plan->figures().reserved_bytes < reserved - 2000); // the segment is freed with it
  }
  rig.close();
}

TEST(release_frees_the_segment) {
  PlanRig rig;
  rig.iterate({MiB, 2 * MiB});
  rig.iterate({MiB, 2 * MiB});
  CHECK_EQ(rig.plan->release(), 3 * MiB);
  CHECK_EQ(rig.plan->release(), std::size_t{0});
  CHECK_EQ(rig.plan->figures().reserved_bytes, 0);
  rig.iterate({MiB, 2 * MiB}); // allocates it again
  CHECK_EQ(rig.report().misses, 0);
  rig.iterate([&] {
    const Allocation used = rig.allocate(MiB);
    CHECK_EQ(rig.plan->release(), std::size_t{0}); // an allocation of the segment is in use
    rig.free(used);
    CHECK_EQ(rig.plan->release(), 3 * MiB);
    rig.pass(2 * MiB); // the upstream serves the rest of the iteration
  });
  CHECK_EQ(rig.report().misses, 1);
  CHECK_EQ(rig.report().plans, 1);
  rig.close();
}

TEST(a_plan_works_without_its_segment) {
  PlanRig rig;
  rig.iterate({20 * MiB, 40 * MiB});
  rig.upstream->release();
  rig.runtime.set_limit(rig.runtime.managed_bytes() + 59 * MiB); // too small for the segment
  rig.iterate([&] { rig.pass(20 * MiB); });
  CHECK_EQ(rig.report().misses, 1);
  CHECK_EQ(rig.report().plans, 1); // another plan would not help
  rig.runtime.set_limit(std::nullopt);
  rig.iterate({20 * MiB, 40 * MiB});
  CHECK_EQ(rig.report().misses, 1);
  CHECK_EQ(rig.report().hits, 2);
  rig.close();
}

TEST(outside_iterations_requests_pass_through) {
  PlanRig rig;
  const Allocation before = rig.allocate(1000);
  rig.iterate({1000, 2000});
  rig.iterate([&] {
    rig.free(before); // created before this iteration: not recorded
    rig.pass(1000);
    rig.pass(2000);
  });
  const Allocation between = rig.allocate(1000);
  CHECK_EQ(rig.report().hits, 2);
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().plans, 1);
  CHECK_THROWS(InvalidArgument, rig.plan->end_iteration());
  rig.plan->begin_iteration();
  CHECK_THROWS(InvalidArgument, rig.plan->begin_iteration());
  rig.free(between);
  rig.plan->end_iteration();
  CHECK_THROWS(InvalidArgument, AllocationPlan(nullptr, kHome));
  CHECK_EQ(rig.plan->description(), "plan(statistics(caching))");
  rig.close();
}

// --- streams, threads, processes ----------------------------------------------------------------------------------

TEST(reuse_waits_for_another_stream) {
  PlanRig rig;
  const Stream other = rig.stream();
  const Event work = rig.runtime.create_event(0, false);
  rig.iterate([&] {
    rig.pass(MiB);
    rig.pass(MiB);
  });
  CHECK_EQ(rig.report().planned_bytes, std::size_t{MiB}); // both have the same bytes
  for (int i = 0; i < 3; ++i) {
    rig.iterate([&] {
      const Allocation first = rig.allocate(MiB);
      rig.plan->record_stream(first, kStream); // its own stream: no effect
      rig.plan->record_stream(first, Stream::host());
      rig.runtime.hold(other);
      rig.runtime.record_event(work, other);
      rig.plan->record_stream(first, other);
      rig.free(first);
      const Allocation second = rig.allocate(MiB);
      CHECK(!overlap(first, second));
      rig.free(second);
    });
    CHECK(!rig.runtime.query_event(work)); // nothing has waited for it
    CHECK_EQ(rig.report().misses, 1); // in the first of these iterations: now the upstream serves the first request
    CHECK_EQ(rig.report().layout.size(), std::size_t{1});
  }
  rig.runtime.destroy_event(work);
  rig.close();
}

TEST(iterations_run_beside_frees_of_another_thread) {
  PlanRig rig;
  std::atomic<bool> over = false;
  std::mutex mutex;
  std::vector<Allocation> passed_on; // some outlive their iteration
  std::thread foreign([&] {
    while (!over) {
      std::vector<Allocation> got;
      {
        const std::lock_guard lock(mutex);
        got.swap(passed_on);
      }
      for (const Allocation& allocation : got) {
        expect_filled(allocation, 9);
        rig.free(allocation);
      }
      rig.plan->release();
      static_cast<void>(rig.report());
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < 150; ++i) {
    rig.iterate([&] {
      for (std::size_t k = 0; k < 20; ++k) {
        const Allocation made = rig.allocate(1000 + 100 * k);
        fill(made, 9);
        if (k % 5 == 4) {
          const std::lock_guard lock(mutex);
          passed_on.push_back(made);
        } else {
          expect_filled(made, 9);
          rig.free(made);
        }
      }
    });
  }
  over = true;
  foreign.join();
  for (const Allocation& allocation : passed_on) {
    rig.free(allocation);
  }
  CHECK_EQ(rig.plan->figures().allocations, 0);
  rig.close();
}

TEST(a_forked_child_has_no_plan) {
  PlanRig rig;
  rig.iterate({1000, 2000});
  rig.plan->begin_iteration();
  const Allocation planned = rig.allocate(1000), apart = rig.allocate(77);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    const auto refused = [](auto call) {
      try {
        call();
        return false;
      } catch (const RuntimeFailure&) {
        return true;
      }
    };
    const bool right = refused([&] { rig.allocate(2000); }) && refused([&] { rig.plan->end_iteration(); });
    rig.free(planned);
    rig.free(apart);
    const std::size_t released = rig.plan->release();
    rig.plan.reset();
    _exit(right && released == 0 ? 0 : 1);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  rig.free(planned);
  rig.free(apart);
  rig.plan->end_iteration();
  rig.close();
}

HARNESS_MAIN()
