// A storage that slides over a part of itself: pieces, failing calls, and the order of streams.
#include <cstring>

#include "residency_rig.h"

namespace {

using namespace residency;

/// Two storages with a gap of half their size below each: each slides over a part of itself.
struct Overlapping {
  Rig rig;
  Storage* low = nullptr;
  Storage* high = nullptr;

  Overlapping() {
    rig.engine.set_host_limit(0);
    Storage& first = rig.make(1, 5 * kBytes / 8);
    low = &rig.make(2, 5 * kBytes / 4);
    Storage& second = rig.make(3, 5 * kBytes / 8);
    high = &rig.make(4, 5 * kBytes / 4);
    rig.free(first);
    rig.free(second);
    CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
  }
  Storage& make_large() {
    return rig.make(9, 5 * kBytes / 4);
  }
  void check() {
    for (Storage* const storage : {low, high}) {
      CHECK(storage->block != nullptr);
      CHECK(std::all_of(storage->ptr, storage->ptr + storage->bytes,
                        [&](unsigned char byte) { return byte == storage->content; }));
      rig.run(40, {storage}, true, [&] {
        Rig::check(*storage);
        Rig::write(*storage, static_cast<unsigned char>(storage->content + 1));
      });
    }
    rig.check_engine();
    if (const auto wrong = rig.memory.check()) {
      throw harness::Failure(*wrong);
    }
  }
};

TEST(a_storage_slides_over_a_part_of_itself_in_pieces) {
  Overlapping it;
  it.rig.runtime.clear_calls();
  CHECK(it.make_large().block != nullptr);
  CHECK(it.rig.engine.statistics().moved.count > 0);
  CHECK(static_cast<std::int64_t>(it.rig.runtime.count("copy_async")) > it.rig.engine.statistics().moved.count);
  it.check();
}

TEST(a_storage_keeps_its_bytes_if_any_call_of_its_slide_fails_and_the_wait_for_its_pieces_too) {
  for (const bool wait_fails : {false, true}) {
    int failed = 0;
    for (std::size_t nth = 1;; ++nth) {
      Overlapping it;
      it.rig.runtime.clear_calls();
      const std::size_t objects = it.rig.runtime.live_objects();
      it.rig.runtime.fail(wait_fails ? "copy_async" : "*", nth);
      if (wait_fails) {
        it.rig.runtime.fail("synchronize_stream", 1);
      }
      bool served = true;
      try {
        it.make_large();
      } catch (const OutOfMemory&) {
        served = false;
      } catch (const RuntimeFailure&) {
        served = false;
      }
      bool reached = false;
      for (const RecordedCall& call : it.rig.runtime.calls()) {
        reached = reached || (call.failed && call.name != "synchronize_stream");
      }
      it.rig.runtime.clear_failures();
      it.check();
      if (!served) {
        CHECK(it.make_large().block != nullptr); // nothing is in the way afterwards
        it.check();
      }
      CHECK(it.rig.runtime.live_objects() <= objects + 8); // events of the pools, and nothing for each failure
      if (!reached) {
        CHECK(served);
        break;
      }
      ++failed;
    }
    CHECK(failed > 1);
  }
}

TEST(a_slide_waits_for_other_streams_and_later_users_wait_for_the_slide) {
  Overlapping it;
  RecordingRuntime& runtime = it.rig.runtime;
  const Stream other = runtime.create_stream(0, 0), later = runtime.create_stream(0, 0);
  const Event kernel = runtime.create_event(0, false);
  for (Storage* const storage : {it.low, it.high}) {
    Engine::Frame frame;
    frame.key = 90;
    {
      const Engine::Lock lock(it.rig.engine);
      const Engine::Operand operand{storage->record, false};
      it.rig.engine.begin(frame, {frame.key, "test", false, false, false}, std::span(&operand, 1), {other});
    }
    const Engine::Lock lock(it.rig.engine);
    it.rig.engine.end(frame);
  }
  runtime.hold(other);
  runtime.record_event(kernel, other);
  CHECK(runtime.query_stream(kStream));
  Block* const large = it.rig.memory.allocate(5 * kBytes / 4, Location::device(0), kStream);
  CHECK(it.rig.engine.statistics().moved.count > 0);
  CHECK(!runtime.query_stream(kStream)); // the copy waits for the kernel
  for (Storage* const storage : {it.low, it.high}) {
    Engine::Frame frame;
    frame.key = 91;
    const Engine::Lock lock(it.rig.engine);
    const Engine::Operand operand{storage->record, false};
    it.rig.engine.begin(frame, {frame.key, "test", false, false, false}, std::span(&operand, 1), {later});
    it.rig.engine.end(frame);
  }
  CHECK(!runtime.query_stream(later));
  runtime.release(other);
  CHECK(runtime.query_stream(kStream));
  CHECK(runtime.query_stream(later));
  it.rig.memory.free(large);
  runtime.destroy_event(kernel);
}

} // namespace

HARNESS_MAIN()
