// Every runtime call fails once, at each place where the allocator makes it. Nothing leaks, and a request that throws
// changes nothing.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>
#include <string>

#include "allocator_rig.h"
#include "recording/recording_runtime.h"

using namespace contract;

namespace {

/// A script that takes every path through the allocator. A step whose block is missing, because an earlier step failed,
/// does nothing.
class Script {
 public:
  Script(std::string_view failing, std::size_t nth)
      : failing_(failing),
        nth_(nth),
        rig_(std::make_unique<RecordingRuntime>(2), true),
        calls_(static_cast<RecordingRuntime&>(*rig_.runtime)) {
    a_ = rig_.stream();
    b_ = rig_.stream();
    work_ = rig_.runtime->create_event(0, false);
    calls_.clear_calls();
    calls_.fail(failing, nth);
  }
  ~Script() {
    rig_.runtime->destroy_event(work_);
  }

  /// \return whether there were that many calls
  bool run() {
    // Reuse on another stream, ordered by an event.
    Block* block = allocate(12 * MiB, a_);
    busy(a_);
    free(block);
    block = allocate(12 * MiB, b_);
    // Used by two streams and moved to the host; the host reuses it.
    step([&] { block != nullptr ? rig_.allocator->record_stream(block, a_) : void(); });
    busy(a_);
    busy(b_);
    free(block);
    block = allocate(512, a_);
    step([&] { block != nullptr ? rig_.allocator->set_home(block, Location::host(), b_) : void(); });
    calls_.release(a_);
    free(block);
    Block* small = allocate(512, a_);
    busy(b_);
    block = step_allocate([&] { return rig_.allocator->allocate(512, Location::host(), Stream::host()); });
    free(block);
    free(small);
    // A block whose event could not be recorded.
    block = allocate(3 * MiB, b_);
    step([&] { block != nullptr ? rig_.allocator->record_stream(block, a_) : void(); });
    lose_event_of(block);
    step([&] { rig_.allocator->empty_cache(); });
    // Memory pressure: pending blocks, cached segments, free neighbours of two streams.
    rig_.runtime->set_limit(64 * MiB);
    Block* pending = allocate(12 * MiB, a_);
    step([&] { pending != nullptr ? rig_.allocator->record_stream(pending, b_) : void(); });
    busy(b_);
    free(pending);
    block = allocate(60 * MiB, a_);
    free(block);
    Block* one = allocate(20 * MiB, a_);
    Block* two = allocate(20 * MiB, b_);
    Block* wall = allocate(20 * MiB, a_);
    busy(a_);
    busy(b_);
    free(one);
    free(two);
    block = step_allocate([&] { return rig_.allocator->allocate(36 * MiB, Location::host(), Stream::host()); });
    free(block);
    free(allocate(200 * MiB, a_)); // does not fit
    free(wall);
    step([&] { rig_.allocator->empty_cache(); });
    return (failing_ == "*" ? calls_.calls().size() : calls_.count(failing_)) >= nth_;
  }

  /// The number of runtime objects that are left after the allocator is destroyed.
  std::size_t leaked() {
    calls_.clear_failures();
    rig_.allocator.reset();
    return calls_.live_objects() - 3; // two streams, one event
  }

 private:
  void check() {
    if (const auto wrong = rig_.allocator->check()) {
      throw harness::Failure(*wrong);
    }
  }

  void step(const std::function<void()>& body) {
    try {
      body();
    } catch (const RuntimeFailure&) { // the failing call
    }
    check();
  }

  Block* step_allocate(const std::function<Block*()>& body) {
    const Statistics before = rig_.allocator->statistics();
    Block* block = nullptr;
    try {
      block = body();
    } catch (const RuntimeFailure&) {
    } catch (const OutOfMemory&) {
    }
    check();
    const Statistics after = rig_.allocator->statistics();
    CHECK_EQ(after.allocation[0].current, before.allocation[0].current + (block != nullptr));
    if (block == nullptr) {
      CHECK_EQ(after.allocation[0].peak, before.allocation[0].peak);
      CHECK_EQ(after.allocation[0].allocated, before.allocation[0].allocated);
      CHECK_EQ(after.requested_bytes[0].current, before.requested_bytes[0].current);
    }
    return block;
  }

  Block* allocate(std::size_t bytes, Stream stream) {
    return step_allocate([&] { return rig_.allocate(bytes, stream); });
  }

  void free(Block* block) {
    rig_.allocator->free(block);
    check();
  }

  /// Queues work that completes only when it is waited for. The failing call may be one of the script's own.
  void busy(Stream stream) {
    calls_.hold(stream);
    step([&] { rig_.runtime->record_event(work_, stream); });
  }

  void lose_event_of(Block* block) {
    if (block == nullptr) {
      return;
    }
    busy(a_);
    calls_.fail("record_event", 1);
    free(block);
  }

  const std::string_view failing_;
  const std::size_t nth_;
  Rig rig_;
  RecordingRuntime& calls_;
  Stream a_, b_;
  Event work_;
};

constexpr const char* kCalls[] = {
    "allocate_managed", "prefetch",    "query_stream",       "synchronize_stream", "create_event",
    "record_event",     "query_event", "synchronize_device", "synchronize_event",  "wait_event",
};

} // namespace

TEST(every_call_fails_at_every_place) {
  for (const char* name : kCalls) {
    std::size_t places = 0;
    for (std::size_t nth = 1;; ++nth) {
      Script script(name, nth);
      const bool reached = script.run();
      const std::size_t leaked = script.leaked();
      if (leaked != 0) {
        throw harness::Failure(std::string(name) + ", call " + std::to_string(nth) + ": leaked " +
                               std::to_string(leaked));
      }
      if (!reached) {
        break;
      }
      ++places;
      CHECK(nth < 200);
    }
    if (places == 0) {
      throw harness::Failure(std::string("the script never calls ") + name);
    }
  }
}

TEST(any_call_fails) {
  std::size_t nth = 1;
  for (;; ++nth) {
    Script script("*", nth);
    const bool reached = script.run();
    CHECK_EQ(script.leaked(), std::size_t{0});
    if (!reached) {
      break;
    }
  }
  CHECK(nth > 40);
}

TEST(the_destructor_tolerates_runtime_failures) {
  RecordingRuntime runtime(1);
  {
    CachingManagedAllocator allocator(runtime, std::make_unique<ManagedSegmentSource>(runtime));
    const Stream other = runtime.create_stream(0, 0);
    for (const std::size_t bytes : {std::size_t{512}, 3 * MiB, 12 * MiB}) {
      Block* const block = allocator.allocate(bytes, kDevice, kStream);
      allocator.record_stream(block, other);
      runtime.hold(other);
      allocator.free(block);
    }
    runtime.fail("synchronize_event", 1);
    runtime.release(other);
    runtime.destroy_stream(other);
  }
  CHECK_EQ(runtime.live_objects(), std::size_t{0});
}

TEST(a_block_freed_twice_ends_the_program) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  // After their frees, the second block still exists as a block; the first is merged with the one behind it, and the
  // third with the one before it. Their handles name no block any more.
  Block* const blocks[] = {rig.allocate(512), rig.allocate(512), rig.allocate(512)};
  for (int twice = 0; twice < 3; ++twice) {
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      std::signal(SIGABRT, SIG_DFL);
      rig.allocator->free(blocks[1]);
      rig.allocator->free(blocks[0]);
      rig.allocator->free(blocks[2]);
      rig.allocator->free(blocks[twice]);
      _exit(0);
    }
    int status = 0;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
  }
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  rig.check();
}

TEST(a_pressure_callback_that_throws_changes_nothing) {
  struct Callback final : PressureCallback {
    bool make_room(std::size_t, Location, Stream) override {
      throw RuntimeFailure("the callback is stuck");
    }
  } callback;
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  rig.runtime->set_limit(20 * MiB);
  rig.allocator->set_pressure_callback(&callback);
  CHECK_THROWS(RuntimeFailure, rig.allocate(64 * MiB));
  rig.check();
  rig.allocator->free(rig.allocate(12 * MiB)); // the mutex is not left locked
}

TEST(a_medium_request_fits_where_a_shared_segment_does_not) {
  RecordingRuntime runtime(1);
  runtime.set_limit(4 * MiB);
  CachingManagedAllocator allocator(runtime, std::make_unique<ManagedSegmentSource>(runtime));
  Block* const block = allocator.allocate(3 * MiB / 2, Location::device(0), Stream::default_of(0));
  CHECK_EQ(runtime.managed_bytes(), 4 * MiB);
  Block* const other = allocator.allocate(3 * MiB / 2, Location::device(0), Stream::default_of(0));
  CHECK_EQ(runtime.managed_bytes(), 4 * MiB);
  CHECK_THROWS(OutOfMemory, allocator.allocate(3 * MiB / 2, Location::device(0), Stream::default_of(0)));
  CHECK(!allocator.check());
  allocator.free(block);
  allocator.free(other);
}

HARNESS_MAIN()
