// The engine on the recording runtime while any single runtime call fails: the bytes stay correct, and later steps
// work.
#include "residency_rig.h"

using namespace residency;

namespace {

/// Ragged sizes: large storages are freed and made again between others that stay, which leaves gaps.
void train_ragged(Rig& rig, int steps) {
  const std::size_t sizes[] = {kBytes / 2, kBytes, kBytes / 2, kBytes, 3 * kBytes / 2, kBytes / 2};
  for (std::size_t number = 0; number < std::size(sizes); ++number) {
    try {
      rig.make(static_cast<unsigned char>(number + 1), sizes[number]);
    } catch (const OutOfMemory&) {
    }
  }
  const std::size_t count = rig.storages.size();
  for (int step = 0; step < steps; ++step) {
    for (std::size_t index = 0; index < count; ++index) {
      Storage& written = *rig.storages[index];
      rig.run(50 + index, {&written}, true, [&] {
        Rig::check(written);
        Rig::write(written, static_cast<unsigned char>(written.content + 1));
      });
      try {
        rig.free(rig.make(100, kBytes + kBytes / 2 * (index % 3)));
      } catch (const OutOfMemory&) {
      }
      rig.storages.erase(rig.storages.begin() + static_cast<std::ptrdiff_t>(count), rig.storages.end());
      rig.check_engine();
    }
  }
  for (std::size_t index = 0; index < count; ++index) {
    rig.run(60, {rig.storages[index].get()}, false, [&] { Rig::check(*rig.storages[index]); });
  }
}

/// Refuses calls for as long as a test says.
class Refusing : public RecordingRuntime {
 public:
  bool query_stream(Stream stream) override {
    return stream != captured && RecordingRuntime::query_stream(stream);
  }
  void record_event(Event event, Stream stream) override {
    if (stream == captured) {
      throw RuntimeFailure("cudaEventRecord on a stream that a graph is captured from");
    }
    RecordingRuntime::record_event(event, stream);
  }
  void copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) override {
    if (refuses_copies && stream != kStream) {
      ++refused;
      throw RuntimeFailure("no copies");
    }
    RecordingRuntime::copy_async(dst, src, bytes, stream);
  }

  Stream captured = Stream::host();
  bool refuses_copies = false; ///< those of the engine's streams
  int refused = 0;
};

} // namespace

TEST(ragged_storages_keep_their_bytes_if_any_call_fails) {
  std::int64_t moved = 0;
  bool reached = true;
  for (std::size_t nth = 1; reached; nth += kEvery) {
    Rig rig;
    rig.runtime.clear_calls();
    rig.runtime.fail("*", nth);
    train_ragged(rig, 3);
    reached = false;
    for (const RecordedCall& call : rig.runtime.calls()) {
      reached = reached || call.failed;
    }
    rig.runtime.clear_failures();
    moved += rig.engine.statistics().moved.count;
    CHECK(reached || rig.engine.statistics().over_budget == 0);
  }
  CHECK(moved > 100);
}

TEST(any_call_of_the_runtime_may_fail_once) {
  int failed = 0;
  for (std::size_t nth = 1;; nth += kEvery) {
    Rig rig;
    rig.runtime.clear_calls();
    rig.runtime.fail("*", nth);
    train(rig, 7, 3);
    bool reached = false;
    for (const RecordedCall& call : rig.runtime.calls()) {
      reached = reached || call.failed;
    }
    rig.runtime.clear_failures();
    train(rig, 0, 2); // later steps work
    rig.check_engine();
    if (!reached) {
      break;
    }
    ++failed;
  }
  CHECK(failed > 100);
}

TEST(a_write_back_waits_for_an_operator_whose_own_wait_failed) {
  Rig rig;
  Storage& used = rig.make(1);
  while (used.block != nullptr) {
    rig.make(9);
  }
  for (const auto& other : rig.storages) {
    if (other.get() != &used) {
      rig.free(*other); // makes room for the fetch
    }
  }
  const Stream other = rig.runtime.create_stream(0, 0);
  const Event kernel = rig.runtime.create_event(0, false);
  rig.runtime.hold(kStream);
  rig.run(76, {&used}, false, [] {}); // its fetch is queued on this stream and not complete
  CHECK(used.block != nullptr);
  rig.runtime.hold(other);
  rig.runtime.fail("wait_event", 1);
  Engine::Frame frame;
  {
    const Engine::Lock lock(rig.engine);
    const Engine::Operand operand{used.record, true};
    rig.engine.begin(frame, {77, "test", false, false, false}, std::span(&operand, 1), {other});
    rig.runtime.record_event(kernel, other);
    Rig::write(used, 2);
    rig.engine.end(frame);
  }
  CHECK(rig.engine.statistics().failures > 0);
  rig.runtime.clear_calls();
  CHECK(rig.engine.make_room(kBudget - 4 * kSlot, Location::device(0), kStream));
  CHECK(used.block == nullptr);
  Rig::check(used);
  bool ordered = false;
  for (const RecordedCall& call : rig.runtime.calls()) {
    ordered = ordered || (call.name == "record_event" && call.stream == other);
    CHECK(ordered || call.name != "copy_async"); // the write-back is ordered after the kernel
  }
  CHECK(ordered);
  rig.runtime.destroy_event(kernel);
  rig.runtime.destroy_stream(other);
}

TEST(a_storage_used_on_a_stream_that_is_captured_is_not_what_a_request_fails_for) {
  RigOn<Refusing> rig;
  const Stream other = rig.runtime.create_stream(0, 0);
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number); // all of the budget
  }
  Engine::Frame frame;
  {
    const Engine::Lock lock(rig.engine);
    const Engine::Operand operand{rig.storages[0]->record, false};
    rig.engine.begin(frame, {77, "test", false, false, false}, std::span(&operand, 1), {other});
    rig.engine.end(frame);
  }
  for (const int later : {1, 2, 3}) { // so that the first one would be evicted
    rig.run(78, {rig.storages[static_cast<std::size_t>(later)].get()}, false, [] {});
  }
  rig.runtime.captured = other;
  rig.make(5);
  CHECK(rig.storages[0]->block != nullptr);
  CHECK_EQ(rig.engine.statistics().over_budget, 0);
  rig.runtime.captured = Stream::host();
  for (const auto& storage : rig.storages) {
    Rig::check(*storage);
  }
  rig.check_engine();
}

TEST(a_fetch_that_fails_is_not_tried_after_each_operator) {
  RigOn<Refusing> rig;
  for (unsigned char number = 1; number <= 8; ++number) {
    rig.make(number);
  }
  constexpr OperatorKey kOperators = 16; // on each storage
  const auto step = [&] {
    for (OperatorKey key = 0; key < 8 * kOperators; ++key) {
      Storage& used = *rig.storages[key / kOperators];
      rig.run(100 + key, {&used}, false, [&] { Rig::check(used); });
    }
  };
  for (int number = 0; number < 6; ++number) {
    step();
  }
  CHECK(rig.engine.statistics().plan_hits > 0);
  rig.runtime.refuses_copies = true;
  step();
  CHECK(rig.runtime.refused > 0);
  CHECK(rig.runtime.refused < 4 * 8);
  rig.runtime.refuses_copies = false;
  step();
  rig.check_engine();
}

TEST(host_memory_that_is_refused_takes_one_host_copy_and_not_all) {
  Rig rig;
  rig.engine.set_host_limit(4 * kBytes);
  for (unsigned char number = 1; number <= 6; ++number) {
    rig.make(number); // the first two are evicted
  }
  Storage& one = *rig.storages[0];
  Storage& other = *rig.storages[1];
  rig.run(70, {&one, &other}, false, [] {}); // evicts the next two: four host copies
  CHECK(one.block != nullptr && other.block != nullptr);
  rig.run(71, {&one, &other}, false, [&] {
    rig.memory.free(rig.memory.allocate(kBytes, Location::device(0), kStream)); // evicts one that has no host copy
  });
  CHECK_EQ((one.record->host_block != nullptr) + (other.record->host_block != nullptr), 1);
  for (const auto& storage : rig.storages) {
    Rig::check(*storage);
  }
  rig.check_engine();
}

HARNESS_MAIN()
