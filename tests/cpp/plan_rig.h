// The rig of the tests of allocation plans.
#pragma once

#include <memory>
#include <vector>

#include "allocator/adaptors/adaptors.h"
#include "allocator/plan/allocation_plan.h"
#include "face_rig.h"
#include "training_steps.h"

namespace face {

/// A plan over a caching allocator with counters, on the recording runtime.
struct PlanRig {
  RecordingRuntime runtime{2};
  std::shared_ptr<Adaptor> upstream = std::make_shared<Adaptor>(caching(runtime));
  std::unique_ptr<AllocationPlan> plan = std::make_unique<AllocationPlan>(upstream, kHome);
  std::vector<Stream> streams; ///< created by `stream`, destroyed with the rig

  /// Checks that everything is returned to the runtime.
  void close() {
    plan.reset();
    CHECK_EQ(upstream->passed().allocations, 0);
    upstream.reset();
    for (const Stream stream : streams) {
      runtime.destroy_stream(stream);
    }
    CHECK_EQ(runtime.live_objects(), std::size_t{0});
  }
  Stream stream() {
    streams.push_back(runtime.create_stream(0, 0));
    return streams.back();
  }
  Allocation allocate(std::size_t bytes, Stream stream = kStream) {
    return plan->allocate(bytes, kHome, stream);
  }
  void free(const Allocation& allocation) {
    plan->free(allocation);
  }
  void pass(std::size_t bytes) {
    free(allocate(bytes));
  }
  template <typename Body>
  void iterate(Body body) {
    plan->begin_iteration();
    body();
    plan->end_iteration();
  }
  /// Allocates all sizes, then frees all.
  void iterate(const std::vector<std::size_t>& sizes, Stream stream = kStream) {
    iterate([&] {
      std::vector<Allocation> held;
      for (const std::size_t bytes : sizes) {
        held.push_back(allocate(bytes, stream));
        fill(held.back(), static_cast<unsigned char>(held.size()));
      }
      for (std::size_t i = 0; i < held.size(); ++i) {
        expect_filled(held[i], static_cast<unsigned char>(i + 1));
        free(held[i]);
      }
    });
  }
  /// Plays a step's requests, and checks their bytes. A request without an end is freed after the iteration.
  void iterate_step(const std::vector<PlanRequest>& requests) {
    std::vector<Allocation> held(requests.size());
    iterate([&] {
      for (const steps::StepEvent& event : steps::events_of(requests)) {
        const std::size_t i = event.request;
        if (event.allocates) {
          held[i] = allocate(requests[i].bytes, requests[i].stream);
          fill(held[i], static_cast<unsigned char>(i));
        } else {
          expect_filled(held[i], static_cast<unsigned char>(i));
          free(held[i]);
        }
      }
    });
    for (std::size_t i = 0; i < requests.size(); ++i) {
      if (requests[i].end == kNoEnd) {
        expect_filled(held[i], static_cast<unsigned char>(i));
        free(held[i]);
      }
    }
  }

  /// The total number of upstream allocations.
  std::int64_t taken() const {
    return upstream->passed().total_allocations;
  }
  PlanReport report() const {
    return plan->report();
  }
};

} // namespace face
