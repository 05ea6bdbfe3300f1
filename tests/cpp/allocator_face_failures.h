// Contract of every Allocator for a failing runtime call: it throws the right error or takes another path, and leaks
// nothing. Part of allocator_face.h.
#pragma once

#include <string>

#include "face_rig.h"

namespace face {

/// A script whose Nth runtime call fails. A step whose allocation is missing because of that does nothing.
class FailingScript {
 public:
  FailingScript(const Face& face, bool nested, std::size_t nth)
      : rig_(recording(), face, nested), a_(rig_.stream()), b_(rig_.stream()), work_(rig_.mark(a_)) {
    rig_.calls().clear_calls();
    rig_.calls().fail("*", nth);
  }

  /// \return whether a call failed
  bool run() {
    step([&] { rig_.make(); });
    if (rig_.allocator == nullptr) {
      step([&] { rig_.make(); }); // the second attempt succeeds
    }
    for (int turn = 0; turn < 3; ++turn) {
      Allocation small = allocate(1000, a_), medium = allocate(3 * MiB, a_), large = allocate(24 * MiB, b_);
      Allocation host = allocate(5000, Stream::host());
      record(small, b_);
      record(medium, b_);
      busy(a_);
      busy(b_);
      free(small);
      free(medium);
      step([&] { rig_.again(); });
      small = allocate(1000, b_);
      medium = allocate(3 * MiB, Stream::host());
      busy(b_);
      record(large, a_);
      free(large);
      step([&] { rig_.allocator->release(); });
      large = allocate(24 * MiB, a_);
      rig_.runtime->set_limit(rig_.runtime->managed_bytes() + 8 * MiB);
      free(allocate(200 * MiB, a_)); // does not fit
      rig_.runtime->set_limit(std::nullopt);
      for (Allocation* const left : {&host, &small, &medium, &large}) {
        free(*left);
      }
      step([&] { rig_.again(); });
    }
    step([&] { rig_.allocator->release(); });
    return std::ranges::any_of(rig_.calls().calls(), &RecordedCall::failed);
  }

  /// The number of runtime objects that are left after the allocators are destroyed.
  std::size_t leaked() {
    rig_.calls().clear_failures();
    expect_empty(rig_);
    rig_.allocator.reset();
    rig_.upstream.reset();
    return rig_.calls().live_objects() - rig_.streams.size() - rig_.events.size();
  }

 private:
  template <typename Body>
  void step(Body body) {
    try {
      body();
    } catch (const RuntimeFailure&) { // the failing call
    } catch (const OutOfMemory&) {
    }
    if (rig_.allocator != nullptr) {
      expect_sound(rig_.allocator->figures());
    }
  }
  Allocation allocate(std::size_t bytes, Stream stream) {
    const auto before = in_hands(*rig_.allocator);
    Allocation made;
    step([&] { made = rig_.allocate(bytes, stream); });
    CHECK(made || in_hands(*rig_.allocator) == before);
    return made;
  }
  void record(const Allocation& allocation, Stream stream) {
    const auto before = in_hands(*rig_.allocator);
    step([&] { rig_.allocator->record_stream(allocation, stream); });
    CHECK(in_hands(*rig_.allocator) == before);
  }
  void free(const Allocation& allocation) {
    const std::int64_t before = rig_.allocator->figures().allocations;
    rig_.allocator->free(allocation);
    CHECK_EQ(rig_.allocator->figures().allocations, before - (allocation ? 1 : 0));
  }
  /// Queues work that completes only when it is waited for. This may be the failing call.
  void busy(Stream stream) {
    rig_.calls().hold(stream);
    step([&] { rig_.runtime->record_event(work_, stream); });
  }

  FaceRig rig_;
  const Stream a_, b_;
  const Event work_;
};

inline void any_call_fails(const Face& face, bool nested) {
  std::size_t nth = 1;
  for (;; ++nth) {
    try {
      FailingScript script(face, nested, nth);
      const bool failed = script.run();
      CHECK_EQ(script.leaked(), std::size_t{0});
      if (!failed) {
        break;
      }
    } catch (const std::exception& error) {
      throw harness::Failure("call " + std::to_string(nth) + ": " + error.what());
    }
  }
  CHECK(nth > 10);
}

} // namespace face
