// Replay of logs: counts, leaks, and failures of memory or of the runtime.
#include <algorithm>
#include <string>
#include <vector>

#include "allocator/adaptors/runtime_allocator.h"
#include "allocator/replay/replay.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/error.h"
#include "runtime/testing/recording_runtime.h"

namespace {

using namespace torch_uvm;
using Kind = ReplayEvent::Kind;

constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

Stream logged(std::uintptr_t handle) {
  return {0, reinterpret_cast<void*>(handle)};
}

/// Two streams and the host; at most three live allocations, one of which is never freed.
ReplayLog small_log() {
  ReplayLog log;
  log.streams = {kStream, logged(0x77), Stream::host()};
  log.allocations = 5;
  log.events = {{Kind::kAllocate, 0, 0, 1000},    {Kind::kAllocate, 1, 1, 3 * MiB}, {Kind::kIterationBegins, 0, 0, 0},
                {Kind::kAllocate, 2, 2, 500},     {Kind::kFree, 1, 1, 3 * MiB},     {Kind::kAllocate, 0, 3, 2 * MiB},
                {Kind::kIterationEnds, 0, 0, 0},  {Kind::kFree, 0, 3, 2 * MiB},     {Kind::kFree, 2, 2, 500},
                {Kind::kAllocate, 0, 4, 1 * MiB}, {Kind::kFree, 0, 4, 1 * MiB}};
  return log;
}

ReplayResult replay_on(const std::string& name, RecordingRuntime& runtime, const ReplayLog& log,
                       std::size_t ceiling = 64 * MiB, int repeat = 2) {
  const ReplayOptions options{kDevice, ceiling, 4 * MiB, {}};
  return replay(log, runtime, [&] { return make_subject(name, runtime, options); }, repeat, nullptr);
}

TEST(every_allocator_replays_the_log_without_leaks) {
  for (const std::string& name : replay_allocators()) {
    RecordingRuntime runtime;
    const ReplayResult result = replay_on(name, runtime, small_log());
    CHECK_EQ(result.failure, "");
    CHECK_EQ(result.calls, std::size_t{9});
    const std::vector<std::size_t> live = {1000, 3 * MiB + 1000, 3 * MiB + 1500, 1500, 2 * MiB + 1500,
                                           1500, 1000,           1 * MiB + 1000, 1000};
    CHECK(result.live == live);
    CHECK_EQ(result.peak_live, 3 * MiB + 1500);
    CHECK_EQ(result.reserved.size(), live.size());
    for (std::size_t row = 0; row < live.size(); ++row) {
      CHECK(result.reserved[row] >= live[row]);
      CHECK(result.reserved[row] <= result.peak_reserved);
    }
    CHECK_EQ(result.seconds.size(), std::size_t{2});
    CHECK_EQ(result.last_iteration_calls, std::size_t{3});
    for (std::size_t turn = 0; turn < 2; ++turn) {
      CHECK(0 < result.last_iteration_seconds.at(turn));
      CHECK(result.last_iteration_seconds[turn] <= result.seconds[turn]);
    }
    CHECK(result.runtime_allocations >= 1);
    CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
    CHECK_EQ(runtime.live_objects(), std::size_t{0}); // including streams and events
  }
}

TEST(replay_on_the_runtime_calls_it_for_each_allocation) {
  RecordingRuntime runtime;
  const ReplayResult result = replay_on("none", runtime, small_log());
  CHECK_EQ(result.runtime_allocations, 5);
  CHECK_EQ(result.runtime_frees, 4); // one is freed after the log, which is not counted
  CHECK(result.live == result.reserved);
  CHECK_EQ(result.mean_live, result.mean_reserved);
  CHECK_EQ(runtime.count("allocate_managed"), std::size_t{3 * 5});
}

TEST(an_event_per_free_is_recorded_where_there_is_a_stream) {
  RecordingRuntime runtime;
  const std::int64_t without = replay_on("caching", runtime, small_log()).events_recorded;
  runtime.clear_calls();
  const ReplayResult with = replay_on("event-per-free", runtime, small_log(), 64 * MiB, 0);
  CHECK_EQ(with.events_recorded, without + 3); // the fourth free belongs to the host
  CHECK(runtime.count("record_event") >= 3);
}

TEST(a_log_is_replayed_on_as_many_streams_as_it_has) {
  RecordingRuntime runtime;
  ReplayLog log = small_log();
  replay_on("caching", runtime, log);
  // for the stream that is neither a default stream nor the host's
  CHECK_EQ(runtime.count("create_stream"), std::size_t{1});
  log.streams[1] = Stream::default_of(5);
  CHECK_THROWS(InvalidArgument, replay_on("caching", runtime, log));
}

TEST(a_subject_is_told_of_iterations) {
  RecordingRuntime runtime;
  std::vector<std::string> told;
  const auto make = [&] {
    ReplaySubject subject;
    subject.runtime = subject.allocator = std::make_shared<RuntimeAllocator>(runtime);
    subject.outside = std::make_shared<RuntimeAllocator>(runtime);
    subject.home = kDevice;
    subject.begin_iteration = [&told, subject] { told.push_back("begins"); };
    subject.end_iteration = [&told, inside = subject.allocator, outside = subject.outside] {
      told.push_back("ends");
      CHECK_EQ(inside->figures().upstream_allocations, 1); // the device's allocations within the iteration
      CHECK_EQ(outside->figures().upstream_allocations, 3); // allocations before the iteration, and the host's
    };
    return subject;
  };
  const ReplayResult result = replay(small_log(), runtime, make, 1, nullptr);
  CHECK(told == std::vector<std::string>({"begins", "ends", "begins", "ends"}));
  CHECK_EQ(result.failure, "");
  CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
}

TEST(no_allocator_exceeds_the_ceiling) {
  for (const std::string& name : replay_allocators()) {
    RecordingRuntime runtime;
    const ReplayResult result = replay_on(name, runtime, small_log(), 3 * MiB);
    CHECK(result.failure.find("3 MiB") != std::string::npos || result.failure.find("3.00 MiB") != std::string::npos);
    CHECK(result.failed_at <= 2); // the row that requests 3 MiB
    CHECK(runtime.peak_managed_bytes() <= 3 * MiB);
    CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
    CHECK_EQ(runtime.live_objects(), std::size_t{0});
  }
}

TEST(any_failing_runtime_call_leaks_nothing) {
  for (const std::string& name : replay_allocators()) {
    for (const char* const call : {"allocate_managed", "create_stream", "create_event", "record_event", "prefetch"}) {
      int failed = 0;
      for (int nth = 1; nth <= 12; ++nth) {
        RecordingRuntime runtime;
        runtime.fail(call, nth);
        try {
          failed += replay_on(name, runtime, small_log()).failure.empty() ? 0 : 1;
        } catch (const RuntimeFailure&) {
          ++failed;
        }
        runtime.clear_failures();
        CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
        CHECK_EQ(runtime.live_objects(), std::size_t{0});
      }
      // The allocator retries a failed allocation, and ignores a failed hint.
      const std::string what = call;
      CHECK(failed > 0 || (what == "allocate_managed" && name != "none") || what == "record_event" ||
            what == "prefetch");
    }
  }
}

TEST(the_progress_callback_may_end_a_replay) {
  RecordingRuntime runtime;
  std::vector<std::pair<std::size_t, std::size_t>> told;
  const auto make = [&] { return make_subject("caching", runtime, {kDevice, 64 * MiB, 0, {}}); };
  replay(small_log(), runtime, make, 2, [&](std::size_t done, std::size_t of) { told.emplace_back(done, of); });
  CHECK_EQ(told.size(), std::size_t{3});
  CHECK_EQ(told.back().first, told.back().second);
  CHECK(std::ranges::is_sorted(told));
  CHECK_THROWS(RuntimeFailure,
               replay(small_log(), runtime, make, 2, [](std::size_t, std::size_t) { throw RuntimeFailure("enough"); }));
  CHECK_EQ(runtime.managed_bytes(), std::size_t{0});
}

TEST(invalid_logs_are_refused) {
  RecordingRuntime runtime;
  const std::vector<std::vector<ReplayEvent>> impossible = {
      {{Kind::kFree, 0, 0, 8}},
      {{Kind::kAllocate, 0, 0, 8}, {Kind::kAllocate, 0, 0, 8}},
      {{Kind::kAllocate, 0, 0, 8}, {Kind::kFree, 0, 0, 8}, {Kind::kFree, 0, 0, 8}},
      {{Kind::kAllocate, 0, 0, 8}, {Kind::kFree, 0, 0, 9}},
      {{Kind::kAllocate, 0, 0, 0}},
      {{Kind::kAllocate, 1, 0, 8}},
      {{Kind::kAllocate, 0, 2, 8}},
      {{Kind::kAllocate, 0, 0, ~std::size_t{0}}, {Kind::kAllocate, 0, 1, 8}},
      {{Kind::kIterationEnds, 0, 0, 0}},
      {{Kind::kIterationBegins, 0, 0, 0}, {Kind::kIterationBegins, 0, 0, 0}},
      {{static_cast<Kind>(9), 0, 0, 8}},
  };
  for (const std::vector<ReplayEvent>& events : impossible) {
    const ReplayLog log{{kStream}, events, static_cast<std::uint32_t>(events.size())};
    CHECK_THROWS(InvalidArgument, replay_on("caching", runtime, log));
  }
  // A table of that size must not be allocated first.
  const ReplayLog many{{kStream}, {{Kind::kAllocate, 0, 0, 8}}, ~std::uint32_t{0}};
  CHECK_THROWS(InvalidArgument, replay_on("caching", runtime, many));
  CHECK_EQ(runtime.count("allocate_managed"), std::size_t{0});
  CHECK_THROWS(InvalidArgument, make_subject("stash", runtime, {}));
  CHECK_EQ(replay_on("caching", runtime, ReplayLog{}).calls, std::size_t{0});
}

} // namespace

HARNESS_MAIN()
