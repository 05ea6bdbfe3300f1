// Every heap allocation of the allocator fails once, as if the host had no memory. A request that throws changes
// nothing, and a freed block is free.
#include <string>

#include "allocator_rig.h"
#include "failing_new.h"
#include "recording/recording_runtime.h"

using namespace contract;

namespace {

class Script {
 public:
  explicit Script(std::size_t nth)
      : failing_(nth),
        rig_(std::make_unique<RecordingRuntime>(2), true),
        calls_(static_cast<RecordingRuntime&>(*rig_.runtime)) {
    a_ = rig_.stream();
    b_ = rig_.stream();
  }

  /// \return whether there were that many allocations
  bool run() {
    for (int turn = 0; turn < 3; ++turn) {
      Block* small = allocate(1000, a_);
      Block* medium = allocate(3 * MiB, a_);
      Block* large = allocate(24 * MiB, b_);
      record(small, b_);
      record(medium, b_);
      calls_.hold(a_);
      calls_.hold(b_);
      free(small);
      free(medium);
      small = allocate(700, b_);
      medium = allocate(2 * MiB, b_);
      record(large, a_);
      calls_.release(a_);
      free(large);
      step([&] { rig_.allocator->empty_cache(); });
      step([&] { move(medium); });
      large = allocate(20 * MiB, a_);
      rig_.runtime->set_limit(rig_.runtime->managed_bytes() + 8 * MiB);
      free(allocate(200 * MiB, a_)); // does not fit
      rig_.runtime->set_limit(std::nullopt);
      for (Block* const left : {small, medium, large}) {
        free(left);
      }
    }
    calls_.release(b_);
    return failing_.has_failed();
  }

  std::size_t leaked() {
    rig_.allocator.reset();
    return calls_.live_objects() - 2; // the streams
  }

 private:
  template <typename Body>
  void step(Body body) {
    try {
      failing_(body);
    } catch (const std::bad_alloc&) {
    } catch (const OutOfMemory&) {
    }
    rig_.check();
  }
  std::int64_t in_hands() const {
    return rig_.allocator->statistics().allocation[0].current;
  }
  Block* allocate(std::size_t bytes, Stream stream) {
    const std::int64_t before = in_hands();
    Block* made = nullptr;
    step([&] { made = rig_.allocate(bytes, stream); });
    CHECK_EQ(in_hands(), before + (made != nullptr ? 1 : 0));
    return made;
  }
  void record(Block* block, Stream stream) {
    step([&] { block != nullptr ? rig_.allocator->record_stream(block, stream) : void(); });
  }
  void move(Block* block) {
    if (block != nullptr) {
      rig_.allocator->set_home(block, Location::host(), Stream::host());
    }
  }
  void free(Block* block) {
    const std::int64_t before = in_hands();
    step([&] { rig_.allocator->free(block); });
    CHECK_EQ(in_hands(), before - (block != nullptr ? 1 : 0));
  }

  failing_new::Countdown failing_;
  Rig rig_;
  RecordingRuntime& calls_;
  Stream a_, b_;
};

} // namespace

TEST(each_heap_allocation_of_the_allocator_may_fail_once) {
  std::size_t failed = 0;
  for (std::size_t nth = 1;; ++nth) {
    try {
      Script script(nth);
      const bool reached = script.run();
      CHECK_EQ(script.leaked(), std::size_t{0});
      if (!reached) {
        break;
      }
    } catch (const std::exception& error) {
      throw harness::Failure("allocation " + std::to_string(nth) + ": " + error.what());
    }
    ++failed;
  }
  CHECK(failed > 20);
}

HARNESS_MAIN()
