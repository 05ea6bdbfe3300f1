// The allocator's steps under memory pressure, cheapest first: polling, waiting, releasing caches, merging, and the
// memory-pressure callback.
#include <string>
#include <vector>

#include "recorded_rig.h"
#include "room_helpers.h"

using namespace contract;

TEST(the_failure_path_tries_cheap_steps_first) {
  struct Callback final : PressureCallback {
    Recorded* rig = nullptr;
    std::vector<std::string> before;
    bool make_room(std::size_t, Location, Stream) override {
      before = rig->names();
      return false;
    }
  } callback;
  Recorded rig;
  callback.rig = &rig;
  rig.runtime->set_limit(64 * MiB);
  rig.allocator->set_pressure_callback(&callback);
  Block* const held = rig.allocate(20 * MiB, rig.a);
  Block* const pending = rig.allocate(20 * MiB, rig.a);
  rig.cache(20 * MiB, rig.b);
  rig.allocator->record_stream(pending, rig.b);
  rig.keep_busy(rig.b);
  rig.allocator->free(pending);
  rig.calls.clear_calls();
  CHECK_THROWS(OutOfMemory, rig.allocate(60 * MiB, rig.a));
  // Recorded and polled without success, refused by the limit (the runtime is not called), waited for, released,
  // refused again.
  const std::vector<std::string> expected{"query_stream", "create_event",      "record_event", "query_event",
                                          "query_event",  "synchronize_event", "free_managed", "free_managed"};
  CHECK(callback.before == expected);
  rig.expect_calls(expected); // the callback freed nothing: no second round
  rig.check();
  rig.allocator->free(held);
}

TEST(pending_blocks_are_waited_for_before_memory_runs_out) {
  Recorded rig;
  rig.runtime->set_limit(64 * MiB);
  Block* const block = rig.allocate(64 * MiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.allocator->record_stream(block, rig.b);
  rig.keep_busy(rig.b);
  rig.allocator->free(block);
  rig.calls.clear_calls();
  Block* const again = rig.allocate(64 * MiB, rig.a);
  CHECK_EQ(rig.address(again), at);
  CHECK_EQ(rig.calls.count("free_managed"), std::size_t{0});
  rig.allocator->free(again);
}

TEST(empty_cache_waits_for_pending_blocks) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  rig.allocator->record_stream(block, rig.b);
  rig.keep_busy(rig.b);
  rig.allocator->free(block);
  rig.calls.clear_calls();
  CHECK_EQ(rig.allocator->empty_cache(), 12 * MiB);
  rig.expect_calls({"query_stream", "create_event", "record_event", "synchronize_event", "free_managed"});
  CHECK_EQ(rig.allocator->statistics().num_sync_all_streams, 1);
  rig.check();
}

TEST(merging_under_pressure_orders_every_stream) {
  Recorded rig;
  rig.runtime->set_limit(64 * MiB);
  rig.cache(64 * MiB, rig.a);
  Block* const one = rig.allocate(20 * MiB, rig.a);
  Block* const two = rig.allocate(20 * MiB, rig.b);
  Block* const wall = rig.allocate(24 * MiB, rig.a);
  rig.allocator->free(one);
  rig.allocator->free(two);
  const Event work = rig.runtime->create_event(0, false);
  for (const Stream stream : {rig.a, rig.b}) {
    rig.calls.hold(stream);
    rig.runtime->record_event(work, stream);
  }
  rig.calls.clear_calls();
  Block* const host = rig.allocator->allocate(36 * MiB, Location::host(), Stream::host());
  CHECK_EQ(rig.calls.count("synchronize_stream"), std::size_t{2});
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 2);
  rig.check();
  rig.allocator->free(host);
  rig.allocator->free(wall);
  rig.runtime->destroy_event(work);
  rig.check();
}

TEST(a_pressure_callback_runs_before_the_host_waits_and_again_while_it_returns_true) {
  struct Callback final : PressureCallback {
    CachingManagedAllocator* allocator = nullptr;
    RecordingRuntime* runtime = nullptr;
    std::vector<Block*> blocks;
    std::size_t asked = 0, waits_before = 0;
    bool always = false;
    Stream stream;
    bool make_room(std::size_t bytes, Location home, Stream for_stream) override {
      CHECK_EQ(bytes, 32 * MiB);
      CHECK(home == kDevice);
      stream = for_stream;
      if (asked++ == 0) {
        waits_before = runtime->count("synchronize_event") + runtime->count("synchronize_stream");
      }
      if (blocks.empty()) {
        return always;
      }
      allocator->free(blocks.back());
      blocks.pop_back();
      return true;
    }
  } callback;
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  callback.allocator = rig.allocator.get();
  callback.runtime = static_cast<RecordingRuntime*>(rig.runtime.get());
  const Stream a = rig.stream(), b = rig.stream();
  rig.allocator->set_cap(0, 64 * MiB + kForSmall);
  rig.allocator->set_pressure_callback(&callback);
  Block* const pending = rig.allocate(32 * MiB, a);
  for (int i = 0; i < 4; ++i) {
    callback.blocks.push_back(rig.allocate(8 * MiB, a));
  }
  rig.allocator->record_stream(pending, b);
  callback.runtime->hold(b);
  const Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, b);
  rig.allocator->free(pending); // 32 MiB for which the host would have to wait
  Block* const block = rig.allocate(32 * MiB, b);
  CHECK_EQ(callback.asked, std::size_t{1}); // the callback freed one block; then the host waited for the pending one
  CHECK_EQ(callback.waits_before, std::size_t{0});
  CHECK(callback.stream == b);
  CHECK_EQ(callback.runtime->count("synchronize_event"), std::size_t{1});
  callback.asked = 0;
  Block* const second = rig.allocate(32 * MiB, a); // the callback frees one block at a time
  CHECK_EQ(callback.asked, std::size_t{3});
  callback.asked = 0;
  callback.always = true;
  CHECK_THROWS(OutOfMemory, rig.allocate(32 * MiB, a));
  // the callback always returns true, but the number of calls is bounded
  CHECK(callback.asked > 3 && callback.asked < 100);
  rig.allocator->free(second);
  rig.allocator->free(block);
  rig.check();
  rig.runtime->destroy_event(work);
}

TEST(a_pressure_callback_may_let_one_request_exceed_a_cap) {
  struct Callback final : PressureCallback {
    bool make_room(std::size_t, Location, Stream) override {
      return false;
    }
    bool may_exceed(std::size_t bytes, Location home) override {
      CHECK_EQ(bytes, 40 * MiB);
      CHECK(home == kDevice);
      CHECK(!rig->allocator->check()); // locks the allocator's mutex
      return lets;
    }
    Rig* rig = nullptr;
    bool lets = false;
  } callback;
  on_each([&](Rig& rig) {
    callback.rig = &rig;
    rig.allocator->set_cap(0, 64 * MiB);
    rig.allocator->set_pressure_callback(&callback);
    Block* const held = rig.allocate(40 * MiB);
    callback.lets = false;
    CHECK_THROWS(OutOfMemory, rig.allocate(40 * MiB));
    callback.lets = true;
    CHECK(rig.allocator->try_allocate(40 * MiB, kDevice, kStream) == nullptr); // does not call the callback
    Block* const over = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics().num_over_cap, 1);
    rig.check();
    rig.allocator->free(over);
    rig.allocator->set_cap(0, 64 * MiB); // releases the excess
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(64 * MiB - kForSmall));
    rig.check();
    rig.allocator->free(held);
  });
}

TEST(a_pressure_callback_that_throws_under_a_cap_changes_nothing) {
  struct Callback final : PressureCallback {
    bool make_room(std::size_t, Location, Stream) override {
      throw RuntimeFailure("the callback is stuck");
    }
  } callback;
  on_each([&](Rig& rig) {
    rig.allocator->set_cap(0, 20 * MiB);
    rig.allocator->set_pressure_callback(&callback);
    CHECK_THROWS(RuntimeFailure, rig.allocate(64 * MiB));
    rig.check();
    CHECK(rig.allocator->try_allocate(64 * MiB, kDevice, kStream) == nullptr); // does not call the callback
    rig.allocator->free(rig.allocate(12 * MiB)); // the mutex is not left locked
  });
}

HARNESS_MAIN()
