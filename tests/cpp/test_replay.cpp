// Replay of logs: counts, leaks, and failures of memory or of the runtime.
#include "allocator/replay/replay.h"

#include <string>
#include <vector>

#include "harness.h"
#include "recording/recording_runtime.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace {

using namespace torch_uvm;
using Kind = ReplayEvent::Kind;

constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

/// Two streams and the host; at most three live allocations, one of which is never freed.
ReplayLog small_log() {
  ReplayLog log;
  log.streams = {kStream, {0, reinterpret_cast<void*>(0x77)}, Stream::host()};
  log.allocations = 5;
  log.events = {{Kind::kAllocate, 0, 0, 1000},    {Kind::kAllocate, 1, 1, 3 * MiB}, {Kind::kIterationBegins, 0, 0, 0},
                {Kind::kAllocate, 2, 2, 500},     {Kind::kFree, 1, 1, 3 * MiB},     {Kind::kAllocate, 0, 3, 2 * MiB},
                {Kind::kIterationEnds, 0, 0, 0},  {Kind::kFree, 0, 3, 2 * MiB},     {Kind::kFree, 2, 2, 500},
                {Kind::kAllocate, 0, 4, 1 * MiB}, {Kind::kFree, 0, 4, 1 * MiB}};
  return log;
}

ReplayResult replay_on(const std::string& name, RecordingRuntime& runtime, const ReplayLog& log, bool sample = true) {
  return replay(log, runtime, name, {kDevice, 4 * MiB, {}}, sample);
}

TEST(every_allocator_replays_the_log_without_leaks) {
  const std::vector<std::size_t> live = {1000, 3 * MiB + 1000, 3 * MiB + 1500, 1500, 2 * MiB + 1500,
                                         1500, 1000,           1 * MiB + 1000, 1000};
  for (const std::string& name : replay_allocators()) {
    RecordingRuntime runtime;
    const ReplayResult result = replay_on(name, runtime, small_log());
    CHECK_EQ(result.failure, "");
    CHECK_EQ(result.reserved.size(), live.size());
    for (std::size_t row = 0; row < live.size(); ++row) {
      CHECK(result.reserved[row] >= live[row]);
      CHECK(name != "none" || result.reserved[row] == live[row]);
      CHECK(result.reserved[row] <= result.peak_reserved);
    }
    CHECK(0 < result.last_iteration_seconds && result.last_iteration_seconds <= result.seconds);
    CHECK_EQ(result.runtime_frees, name == "none" ? 4 : 0); // one is freed after the log, which is not counted
    CHECK(name == "none" ? result.runtime_allocations == 5 : result.runtime_allocations >= 1);
    CHECK_EQ(runtime.count("create_stream"), std::size_t{1}); // neither a default stream nor the host's
    CHECK(replay_on(name, runtime, small_log(), false).reserved.empty());
    CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
    CHECK_EQ(runtime.live_objects(), std::size_t{0});
  }
}

TEST(arenas_and_plans_are_told_of_iterations) {
  ReplayLog log{{kStream}, {}, 0};
  for (std::uint32_t turn = 0; turn < 4; ++turn) {
    log.events.push_back({Kind::kIterationBegins, 0, 0, 0});
    for (int request = 0; request < 3; ++request) { // an arena does not reuse freed memory within an iteration
      log.events.push_back({Kind::kAllocate, 0, log.allocations, 80 * MiB});
      log.events.push_back({Kind::kFree, 0, log.allocations++, 80 * MiB});
    }
    log.events.push_back({Kind::kIterationEnds, 0, 0, 0});
  }
  RecordingRuntime runtime;
  const auto reserved = replay_on("arena", runtime, log).reserved;
  CHECK(reserved[5] > reserved[1]);
  CHECK_EQ(reserved.back(), reserved[5]); // the other iterations get the first one's blocks
  CHECK(replay_on("plan", runtime, log).last_iteration_seconds > 0);
}

TEST(an_allocator_without_memory_fails) {
  for (const std::string& name : replay_allocators()) {
    RecordingRuntime runtime;
    runtime.set_limit(3 * MiB);
    const ReplayResult result = replay_on(name, runtime, small_log());
    CHECK(!result.failure.empty());
    CHECK(result.failed_at <= 2); // the row that requests 3 MiB
    CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
    CHECK_EQ(runtime.live_objects(), std::size_t{0});
  }
}

TEST(any_failing_runtime_call_leaks_nothing) {
  for (const std::string& name : replay_allocators()) {
    for (std::size_t nth = 1; nth <= 24; ++nth) {
      RecordingRuntime runtime;
      runtime.fail("*", nth);
      try {
        replay_on(name, runtime, small_log());
      } catch (const RuntimeFailure&) {
      }
      runtime.clear_failures();
      CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
      CHECK_EQ(runtime.live_objects(), std::size_t{0});
    }
  }
}

TEST(invalid_logs_are_refused) {
  RecordingRuntime runtime;
  const std::vector<std::vector<ReplayEvent>> impossible = {
      {{Kind::kFree, 0, 0, 8}},
      {{Kind::kAllocate, 0, 0, 8}, {Kind::kAllocate, 0, 0, 8}},
      {{Kind::kAllocate, 0, 0, 8}, {Kind::kFree, 0, 0, 8}, {Kind::kFree, 0, 0, 8}},
      {{Kind::kAllocate, 1, 0, 8}},
      {{Kind::kAllocate, 0, 2, 8}},
      {{static_cast<Kind>(9), 0, 0, 8}},
  };
  for (const std::vector<ReplayEvent>& events : impossible) {
    const ReplayLog log{{kStream}, events, static_cast<std::uint32_t>(events.size())};
    CHECK_THROWS(InvalidArgument, replay_on("caching", runtime, log));
  }
  CHECK_THROWS(InvalidArgument,
               replay_on("plan", runtime,
                         {{kStream}, {{Kind::kIterationBegins, 0, 0, 0}, {Kind::kIterationBegins, 0, 0, 0}}, 0}));
  CHECK_THROWS(InvalidArgument,
               replay_on("caching", runtime, {{Stream::default_of(5)}, {{Kind::kAllocate, 0, 0, 8}}, 1}));
  // A table of that size must not be allocated.
  CHECK_EQ(replay_on("caching", runtime, {{kStream}, {{Kind::kAllocate, 0, 0, 8}}, ~std::uint32_t{0}}).failure, "");
  CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
  CHECK_THROWS(InvalidArgument, replay_on("stash", runtime, {}));
}

} // namespace

HARNESS_MAIN()
