// Requests that outlive their iteration or have no end, and the lifetime of a plan's segment.
#include <memory>
#include <utility>
#include <vector>

#include "allocator/adaptors/adaptor.h"
#include "plan_rig.h"

using namespace plans;

namespace {

/// Refuses requests of more than `most` bytes.
class Refusing final : public Adaptor {
 public:
  using Adaptor::Adaptor;
  Allocation allocate(std::size_t bytes, Location home, Stream stream) override {
    if (bytes > most) {
      ++refused;
      throw OutOfMemory(OutOfMemory::Cause::kRuntime, bytes, "refused");
    }
    return Adaptor::allocate(bytes, home, stream);
  }
  std::string description() const override {
    return "refusing";
  }

  std::size_t most = GiB;
  int refused = 0;
};

} // namespace

TEST(bytes_that_are_still_in_use_are_not_reused) {
  PlanRig rig;
  rig.iterate([&] {
    rig.free(rig.allocate(MiB));
    rig.free(rig.allocate(MiB));
  });
  CHECK_EQ(rig.report().planned_bytes, std::size_t{MiB});
  for (int i = 0; i < 2; ++i) {
    rig.iterate([&] {
      const Allocation first = rig.allocate(MiB);
      fill(first, 1);
      const Allocation second = rig.allocate(MiB); // allocated before the first one is freed
      fill(second, 2);
      CHECK(!overlap(first, second));
      expect_filled(first, 1);
      rig.free(first);
      rig.free(second);
    });
    CHECK_EQ(rig.report().misses, 1); // in the first of these iterations only
  }
  CHECK_EQ(rig.report().plans, 2);
  CHECK_EQ(rig.report().planned_bytes, std::size_t{2 * MiB});
  rig.close();
}

TEST(requests_that_outlive_the_iteration_are_not_in_the_segment) {
  PlanRig rig;
  const std::vector<PlanRequest> step = {{MiB, 0, 3, kStream}, {700, 1, kNoEnd, kStream}, {MiB, 2, 4, kStream}};
  rig.iterate_step(step);
  CHECK_EQ(rig.report().planned_bytes, std::size_t{2 * MiB});
  for (int i = 0; i < 3; ++i) {
    const std::int64_t before = rig.taken();
    rig.iterate_step(step);
    CHECK_EQ(rig.taken(), before + (i == 0 ? 2 : 1));
  }
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().outlived, 0);
  CHECK_EQ(rig.report().plans, 1);
  CHECK_EQ(rig.report().hits, 9);
  rig.close();
}

TEST(a_planned_request_that_outlives_keeps_its_bytes_and_leaves_the_plan) {
  PlanRig rig;
  rig.iterate({1000, 2000});
  std::vector<Allocation> kept;
  for (int i = 0; i < 3; ++i) {
    rig.iterate([&] {
      rig.free(rig.allocate(1000));
      kept.push_back(rig.allocate(2000));
      fill(kept.back(), static_cast<unsigned char>(i));
    });
    CHECK_EQ(rig.report().outlived, 1); // in the first of these iterations; afterwards the upstream serves the request
  }
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().plans, 2);
  for (int i = 0; i < 3; ++i) {
    expect_filled(kept[static_cast<std::size_t>(i)], static_cast<unsigned char>(i));
  }
  const std::int64_t reserved = rig.plan->figures().reserved_bytes;
  rig.free(kept[0]); // the segment is freed together with it
  CHECK(rig.plan->figures().reserved_bytes < reserved - 2000);
  rig.free(kept[1]);
  rig.free(kept[2]);
  rig.close();
}

TEST(a_request_that_sometimes_outlives_stays_out_of_the_plan) {
  PlanRig rig;
  rig.iterate({1000, 2000});
  for (int i = 0; i < 10; ++i) { // must not alternate between two plans
    Allocation kept;
    rig.iterate([&] {
      rig.free(rig.allocate(1000));
      kept = rig.allocate(2000);
      if (i % 2 == 1) {
        rig.free(std::exchange(kept, {}));
      }
    });
    rig.free(kept);
  }
  CHECK_EQ(rig.report().plans, 2);
  CHECK_EQ(rig.report().outlived, 1);
  CHECK_EQ(rig.report().misses, 0);
  rig.close();
}

TEST(a_request_without_an_end_enters_the_plan_once_it_has_one) {
  PlanRig rig;
  const Allocation kept = [&] {
    rig.plan->begin_iteration();
    rig.free(rig.allocate(1000));
    const Allocation made = rig.allocate(2000);
    rig.plan->end_iteration();
    return made;
  }();
  rig.free(kept);
  CHECK_EQ(rig.report().planned_requests, std::size_t{1});
  const auto both = [&] {
    rig.iterate([&] {
      rig.free(rig.allocate(1000));
      rig.free(rig.allocate(2000));
    });
  };
  both();
  CHECK_EQ(rig.report().planned_requests, std::size_t{2});
  both();
  CHECK_EQ(rig.report().plans, 2);
  CHECK_EQ(rig.report().misses, 0);
  CHECK_EQ(rig.report().planned_bytes, std::size_t{2048});
  rig.close();
}

TEST(release_frees_the_segment_in_one_piece) {
  PlanRig rig;
  rig.iterate({MiB, 2 * MiB});
  rig.iterate({MiB, 2 * MiB});
  CHECK_EQ(rig.plan->release(), 3 * MiB);
  CHECK_EQ(rig.plan->release(), std::size_t{0});
  CHECK_EQ(rig.plan->figures().reserved_bytes, 0);
  const std::int64_t before = rig.taken();
  rig.iterate({MiB, 2 * MiB});
  CHECK_EQ(rig.taken(), before + 1);
  rig.plan->begin_iteration();
  const Allocation used = rig.allocate(MiB);
  CHECK_EQ(rig.plan->release(), std::size_t{0}); // an allocation of the segment is in use
  rig.free(used);
  CHECK_EQ(rig.plan->release(), 3 * MiB);
  const Allocation next = rig.allocate(2 * MiB); // allocates the segment again, within the iteration
  CHECK_EQ(rig.plan->figures().reserved_bytes, static_cast<std::int64_t>(3 * MiB));
  rig.free(next);
  rig.plan->end_iteration();
  CHECK_EQ(rig.report().misses, 0);
  rig.close();
}

TEST(a_plan_works_without_its_segment) {
  PlanRig rig;
  auto refusing = std::make_shared<Refusing>(rig.upstream);
  rig.plan = std::make_unique<AllocationPlan>(refusing, kHome);
  rig.iterate({1 * MiB, 2 * MiB});
  refusing->most = 2 * MiB; // large enough for the requests, too small for the segment
  rig.iterate({1 * MiB, 2 * MiB});
  CHECK_EQ(refusing->refused, 1); // requested once in an iteration
  CHECK_EQ(rig.report().misses, 2);
  CHECK_EQ(rig.report().plans, 1); // another plan would not help
  refusing->most = GiB;
  rig.iterate({1 * MiB, 2 * MiB});
  CHECK_EQ(rig.report().misses, 2);
  CHECK_EQ(rig.report().hits, 2);
  refusing.reset();
  rig.close();
}

TEST(outside_iterations_requests_pass_through) {
  PlanRig rig;
  const Allocation before = rig.allocate(1000);
  rig.iterate({1000, 2000});
  rig.iterate([&] {
    rig.free(before); // created before this iteration: not recorded
    rig.free(rig.allocate(1000));
    rig.free(rig.allocate(2000));
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

HARNESS_MAIN()
