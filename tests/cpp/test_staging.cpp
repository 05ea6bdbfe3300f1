// Copies through slots of plain device memory: the bytes are correct for every order of work, and failures are
// reported.
#include <cmath>
#include <cstring>
#include <random>

#include "harness.h"
#include "recording/recording_runtime.h"
#include "residency/engine/staging.h"
#include "residency/engine/transfers.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/error.h"

namespace {

using namespace torch_uvm;

constexpr std::size_t kSlot = 64 * KiB;
constexpr std::size_t kBytes = 4 * MiB;

struct Memory {
  explicit Memory(ManagedRuntime& runtime) : runtime(runtime) {
    managed = static_cast<unsigned char*>(runtime.allocate_managed(kBytes, Location::device(0)));
    source = static_cast<unsigned char*>(runtime.allocate_pinned(kBytes));
    result = static_cast<unsigned char*>(runtime.allocate_pinned(kBytes));
    std::memset(result, 0, kBytes);
  }
  ~Memory() {
    runtime.synchronize_device(0);
    runtime.free_managed(managed);
    runtime.free_pinned(source);
    runtime.free_pinned(result);
  }

  ManagedRuntime& runtime;
  unsigned char* managed;
  unsigned char* source;
  unsigned char* result;
};

void after(ManagedRuntime& runtime, Stream earlier, Stream later) {
  const Event event = runtime.create_event(0, false);
  runtime.record_event(event, earlier);
  runtime.wait_event(later, event);
  runtime.destroy_event(event);
}

TEST(the_bytes_are_right_under_delayed_schedules) {
  for (std::uint64_t seed = 1; seed <= 30; ++seed) {
    EmulatedConfig config;
    config.memory = 64 * MiB;
    config.schedule_seed = seed;
    EmulatedRuntime runtime(config);
    Memory memory(runtime);
    std::mt19937 random(static_cast<unsigned>(seed));
    for (std::size_t at = 0; at < kBytes; ++at) {
      memory.source[at] = static_cast<unsigned char>(random());
    }
    const Stream fetches = runtime.create_stream(0, 0), write_backs = runtime.create_stream(0, 0);
    Staging in(runtime, Staging::Direction::kToDevice, runtime.create_stream(0, 0));
    Staging out(runtime, Staging::Direction::kToHost, runtime.create_stream(0, 0));
    in.resize(kSlot);
    out.resize(kSlot);
    CHECK(in.is_ready() && out.is_ready());
    for (std::size_t at = 0; at < kBytes;) { // some slots get a single byte, and no slot waits for another
      const std::size_t bytes = std::min<std::size_t>(1 + random() % (5 * kSlot), kBytes - at);
      in.begin(bytes, fetches);
      in.copy(memory.managed + at, memory.source + at, bytes, fetches);
      after(runtime, fetches, write_backs);
      out.begin(bytes, write_backs);
      out.copy(memory.result + at, memory.managed + at, bytes, write_backs);
      at += bytes;
    }
    runtime.synchronize_stream(out.link());
    CHECK(std::memcmp(memory.result, memory.source, kBytes) == 0);
  }
}

TEST(the_managed_side_follows_the_order_of_its_stream) {
  EmulatedRuntime runtime(EmulatedConfig{});
  Memory memory(runtime);
  std::memset(memory.source, 7, kBytes);
  const Stream stream = runtime.create_stream(0, 0);
  Staging in(runtime, Staging::Direction::kToDevice, runtime.create_stream(0, 0));
  in.resize(kSlot);
  CHECK(in.is_ready());
  CHECK(in.begin(kBytes, stream) == in.link());
  in.copy(memory.managed, memory.source, kBytes, stream);
  runtime.synchronize_stream(stream); // synchronises no other stream
  CHECK(std::memcmp(memory.managed, memory.source, kBytes) == 0);

  Staging out(runtime, Staging::Direction::kToHost, runtime.create_stream(0, 0));
  out.resize(kSlot);
  CHECK(out.is_ready());
  CHECK(out.begin(kBytes, stream) == stream);
  out.copy(memory.result, memory.managed, kBytes, stream);
  runtime.synchronize_stream(out.link());
  CHECK(std::memcmp(memory.result, memory.source, kBytes) == 0);
}

TEST(slots_are_allocated_on_first_use_and_released) {
  RecordingRuntime runtime;
  Staging staging(runtime, Staging::Direction::kToHost, runtime.create_stream(0, 0));
  CHECK(!staging.is_ready()); // no size has been set
  staging.resize(kSlot);
  CHECK_EQ(staging.bytes(), std::size_t{0});
  CHECK(staging.is_ready());
  CHECK_EQ(staging.bytes(), 2 * kSlot);
  staging.resize(2 * kSlot);
  CHECK_EQ(staging.bytes(), std::size_t{0});
  CHECK(staging.is_ready());
  CHECK_EQ(staging.bytes(), 4 * kSlot);
  staging.resize(0);
  CHECK(!staging.is_ready());
}

TEST(a_full_device_is_tried_once) {
  for (const std::size_t nth : {1, 2}) {
    RecordingRuntime runtime;
    Staging staging(runtime, Staging::Direction::kToDevice, runtime.create_stream(0, 0));
    staging.resize(kSlot);
    runtime.fail("allocate_device", nth);
    CHECK(!staging.is_ready());
    CHECK(!staging.is_ready());
    CHECK_EQ(staging.bytes(), std::size_t{0});
    staging.resize(2 * kSlot); // for another budget
    CHECK(staging.is_ready());
  }
}

TEST(no_copies_follow_one_that_failed_half_way) {
  for (const char* call : {"copy_async", "record_event", "wait_event"}) {
    for (std::size_t nth = 1; nth <= 4; ++nth) {
      RecordingRuntime runtime;
      Memory memory(runtime);
      const Stream stream = runtime.create_stream(0, 0);
      Staging staging(runtime, Staging::Direction::kToDevice, runtime.create_stream(0, 0));
      staging.resize(kSlot);
      CHECK(staging.is_ready());
      runtime.fail(call, nth);
      CHECK_THROWS(RuntimeFailure, staging.copy(memory.managed, memory.source, 4 * kSlot, stream));
      CHECK(!staging.is_ready());
      staging.resize(0); // waits for the queued copies
      staging.resize(kSlot);
      CHECK(staging.is_ready());
      std::memset(memory.source, 9, kBytes);
      staging.copy(memory.managed, memory.source, kBytes, stream);
      runtime.synchronize_stream(stream);
      CHECK(std::memcmp(memory.managed, memory.source, kBytes) == 0);
    }
  }
}

TEST(one_copy_in_64_mib_is_timed) {
  RecordingRuntime runtime;
  Memory memory(runtime);
  const Stream stream = runtime.create_stream(0, 0);
  Transfers transfers(runtime);
  for (int copy = 0; copy < 48; ++copy) { // 192 MiB
    transfers.copy(Transfers::Kind::kFetch, memory.managed, memory.source, kBytes, stream, nullptr, false);
  }
  CHECK_EQ(runtime.count("record_event"), std::size_t{2 * 3}); // the first copy, and two more
  transfers.copy(Transfers::Kind::kFetch, memory.managed, memory.source, kBytes, stream, nullptr, true);
  transfers.copy(Transfers::Kind::kWriteBack, memory.result, memory.managed, kBytes, stream, nullptr, false);
  CHECK_EQ(runtime.count("record_event"), std::size_t{2 * 5}); // asked for; the first of its direction
}

TEST(untimed_copies_count_by_their_bytes) {
  EmulatedRuntime runtime(EmulatedConfig{});
  Memory memory(runtime);
  const Stream stream = runtime.create_stream(0, 0);
  const auto ms_of = [&](bool timed) {
    Transfers transfers(runtime);
    ResidencyStatistics statistics;
    for (int copy = 0; copy < 15; ++copy) {
      transfers.copy(Transfers::Kind::kFetch, memory.managed, memory.source, kBytes, stream, nullptr, timed);
    }
    runtime.synchronize_stream(stream);
    transfers.collect(statistics);
    CHECK_EQ(statistics.fetched.count, 15);
    CHECK_EQ(statistics.fetched.bytes, 15 * static_cast<std::int64_t>(kBytes));
    CHECK_EQ(statistics.written_back.ms, 0);
    return statistics.fetched.ms;
  };
  ms_of(true); // the first copy moves the pages
  const double each = ms_of(true);
  CHECK(each > 0);
  CHECK(std::abs(ms_of(false) - each) < 0.1 * each); // the timed one is the first, which also waits for its launch
}

} // namespace

HARNESS_MAIN()
