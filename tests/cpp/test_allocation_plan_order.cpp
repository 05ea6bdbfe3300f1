// Plans with several streams and threads, failing calls and forks, and the suite that every Allocator passes.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "allocator_face.h"
#include "plan_rig.h"

using namespace plans;

namespace {

const bool registered =
    face::register_face("plan", {.make =
                                     [](ManagedRuntime&, std::shared_ptr<Allocator> upstream) {
                                       auto plan = std::make_shared<AllocationPlan>(std::move(upstream), kHome);
                                       plan->begin_iteration();
                                       return plan;
                                     },
                                 .again =
                                     [](Allocator& allocator) {
                                       auto& plan = dynamic_cast<AllocationPlan&>(allocator);
                                       plan.end_iteration();
                                       plan.begin_iteration();
                                     }});

/// Runs iterations of all kinds, in which the nth runtime call fails. Steps whose allocation failed are skipped.
/// \return whether there were that many calls
bool iterations_with_a_failing_call(std::size_t nth) {
  PlanRig rig;
  const Stream other = rig.stream();
  rig.runtime.clear_calls();
  rig.runtime.fail("*", nth);
  std::vector<Allocation> kept;
  const auto step = [](auto body) {
    try {
      body();
    } catch (const RuntimeFailure&) { // the failing call
    } catch (const OutOfMemory&) {
    }
  };
  const auto allocate = [&](std::size_t bytes, Stream stream) {
    Allocation made;
    const std::int64_t before = rig.plan->figures().allocations;
    step([&] {
      made = rig.allocate(bytes, stream);
      fill(made, static_cast<unsigned char>(bytes % 251));
    });
    CHECK_EQ(rig.plan->figures().allocations, before + (made ? 1 : 0));
    return made;
  };
  for (std::size_t i = 0; i < 7; ++i) {
    rig.iterate([&] {
      std::vector<Allocation> held;
      for (const std::size_t bytes : {std::size_t{1000}, 3 * MiB, 12 * MiB, 5000 + i / 3}) {
        held.push_back(allocate(bytes, kStream));
        held.push_back(allocate(bytes, other));
      }
      if (i >= 4) { // from here on it is shared, and one request outlives its iteration
        step([&] { rig.plan->record_stream(held[2], other); });
        kept.push_back(std::exchange(held[4], {}));
      }
      for (const Allocation& allocation : held) {
        if (allocation) {
          expect_filled(allocation, static_cast<unsigned char>(allocation.bytes % 251));
        }
        rig.free(allocation);
      }
    });
    if (i % 3 == 2) {
      step([&] { rig.plan->release(); });
    }
  }
  for (const Allocation& allocation : kept) {
    rig.free(allocation);
  }
  const auto calls = rig.runtime.calls();
  rig.runtime.clear_failures();
  rig.close();
  return std::ranges::any_of(calls, &RecordedCall::failed);
}

} // namespace

TEST(streams_have_segments_of_their_own) {
  PlanRig rig;
  const Stream other = rig.stream();
  const auto iteration = [&] {
    rig.iterate([&] {
      for (const Stream stream : {kStream, other, Stream::host()}) {
        const Allocation a = rig.allocate(MiB, stream), b = rig.allocate(2 * MiB, stream);
        fill(a, 1);
        fill(b, 2);
        rig.free(a);
        rig.free(b);
      }
    });
  };
  iteration();
  const std::int64_t before = rig.taken();
  iteration();
  CHECK_EQ(rig.taken(), before + 3);
  rig.runtime.clear_calls();
  iteration();
  CHECK_EQ(rig.runtime.calls().size(), std::size_t{0});
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().planned_bytes, 9 * MiB);
  rig.close();
}

TEST(the_upstream_serves_requests_that_another_stream_uses) {
  PlanRig rig;
  const Stream other = rig.stream();
  const auto iteration = [&] {
    rig.iterate([&] {
      const Allocation shared = rig.allocate(MiB);
      rig.plan->record_stream(shared, other);
      rig.free(shared);
      rig.free(rig.allocate(2 * MiB));
    });
  };
  iteration();
  CHECK_EQ(rig.report().planned_requests, std::size_t{1});
  iteration();
  iteration();
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().hits, 4);
  CHECK_EQ(rig.report().plans, 1);
  rig.close();
}

TEST(reuse_waits_for_a_stream_recorded_unexpectedly) {
  for (const bool by_plan : {true, false}) { // the plan serves the request until then, or the upstream does
    PlanRig rig;
    const Stream other = rig.stream();
    const auto iteration = [&](std::size_t before, auto use) {
      rig.iterate([&] {
        rig.free(rig.allocate(before));
        const Allocation first = rig.allocate(MiB);
        use(first);
        rig.free(first);
        const Allocation second = rig.allocate(MiB); // the plan gives it the same bytes
        CHECK(!overlap(first, second) || rig.runtime.query_stream(other));
        rig.free(second);
      });
    };
    iteration(1000, [](const Allocation&) {});
    CHECK_EQ(rig.report().planned_bytes, std::size_t{MiB});
    const Event work = rig.runtime.create_event(0, false);
    const std::size_t changed = by_plan ? 1000 : 2000;
    iteration(changed, [&](const Allocation& first) {
      rig.plan->record_stream(first, kStream); // its own stream: no effect
      rig.plan->record_stream(first, Stream::host());
      rig.runtime.hold(other);
      rig.runtime.record_event(work, other);
      rig.plan->record_stream(first, other);
    });
    const std::int64_t misses = rig.report().misses;
    CHECK_EQ(misses, by_plan ? 1 : 2);
    CHECK_EQ(rig.report().plans, 2);
    CHECK(!rig.runtime.query_event(work)); // nothing has waited for it
    iteration(changed, [&](const Allocation& first) { rig.plan->record_stream(first, other); });
    CHECK_EQ(rig.report().misses, misses);
    rig.runtime.destroy_event(work);
    rig.close();
  }
}

TEST(reuse_in_the_next_iteration_waits_for_a_recorded_stream) {
  PlanRig rig;
  const Stream other = rig.stream();
  rig.iterate({MiB});
  rig.runtime.hold(other);
  const Event work = rig.runtime.create_event(0, false);
  Allocation shared;
  rig.iterate([&] {
    shared = rig.allocate(MiB);
    rig.runtime.record_event(work, other);
    rig.plan->record_stream(shared, other);
    rig.free(shared);
  });
  CHECK_EQ(rig.report().misses, 0); // no request of that iteration needed the bytes
  rig.iterate([&] {
    const Allocation next = rig.allocate(MiB);
    CHECK(!overlap(shared, next));
    rig.free(next);
  });
  CHECK(!rig.runtime.query_event(work));
  CHECK_EQ(rig.report().planned_requests, std::size_t{0});
  rig.runtime.destroy_event(work);
  rig.close();
}

TEST(a_stream_recorded_between_iterations_removes_the_request_from_the_plan) {
  PlanRig rig;
  const Stream other = rig.stream();
  rig.iterate({1000, 2000});
  rig.plan->begin_iteration();
  const Allocation kept = rig.allocate(1000);
  rig.free(rig.allocate(2000));
  rig.plan->end_iteration();
  rig.plan->record_stream(kept, other);
  rig.iterate({1000, 2000});
  CHECK_EQ(rig.report().misses, 0);
  rig.free(kept);
  rig.iterate({1000, 2000});
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().outlived, 1);
  rig.close();
}

TEST(two_threads_allocate_in_any_order) {
  PlanRig rig;
  for (int i = 0; i < 60; ++i) {
    std::atomic<int> ready = 0;
    std::vector<std::string> failures(2);
    rig.plan->begin_iteration();
    std::vector<std::thread> threads;
    for (std::size_t t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        ++ready;
        while (ready < 2) {
          std::this_thread::yield();
        }
        try {
          std::vector<Allocation> held;
          for (std::size_t k = 0; k < 40; ++k) {
            held.push_back(rig.allocate(500 + 1000 * t + 64 * (k % 7)));
            fill(held.back(), static_cast<unsigned char>(t * 100 + k));
            if (k % 3 == 2) {
              expect_filled(held[k - 1], static_cast<unsigned char>(t * 100 + k - 1));
              rig.free(std::exchange(held[k - 1], {}));
            }
          }
          for (std::size_t k = 0; k < held.size(); ++k) {
            if (held[k]) {
              expect_filled(held[k], static_cast<unsigned char>(t * 100 + k));
              rig.free(held[k]);
            }
          }
        } catch (const std::exception& error) {
          failures[t] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    CHECK_EQ(failures[0] + failures[1], "");
    rig.plan->end_iteration();
    CHECK_EQ(rig.plan->figures().allocations, 0);
  }
  CHECK_EQ(rig.report().hits + rig.report().misses, 59 * 80);
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

TEST(any_runtime_call_may_fail_without_a_leak) {
  std::size_t nth = 1;
  while (iterations_with_a_failing_call(nth)) {
    ++nth;
  }
  CHECK(nth > 10);
}

TEST(a_forked_child_has_no_plan) {
  PlanRig rig;
  rig.iterate({1000, 2000});
  rig.plan->begin_iteration();
  const Allocation planned = rig.allocate(1000), apart = rig.allocate(77);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    int failed = 0;
    try {
      static_cast<void>(rig.allocate(2000));
      failed = 1;
    } catch (const RuntimeFailure&) {
    }
    try {
      rig.plan->end_iteration();
      failed = 2;
    } catch (const RuntimeFailure&) {
    }
    rig.free(planned);
    rig.free(apart);
    failed = rig.plan->release() == 0 ? failed : 3;
    rig.plan.reset();
    _exit(failed);
  }
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  rig.free(planned);
  rig.free(apart);
  rig.plan->end_iteration();
  rig.close();
}

HARNESS_MAIN()
