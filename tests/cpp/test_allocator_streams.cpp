// Which runtime calls the allocator makes, and which it does not: events, waits, prefetches, retries.
#include <utility>

#include "allocator/size_classes.h"
#include "allocator_rig.h"
#include "runtime/testing/recording_runtime.h"

using namespace contract;

namespace {

struct Recorded : Rig {
  explicit Recorded(AllocatorOptions options = apart())
      : Rig(std::make_unique<RecordingRuntime>(2), true, options),
        calls(static_cast<RecordingRuntime&>(*runtime)),
        a(stream()),
        b(stream()),
        work(runtime->create_event(0, false)) {
    calls.clear_calls();
  }
  ~Recorded() {
    runtime->destroy_event(work);
  }
  Recorded(Recorded&&) = delete;

  /// Work is queued, and does not begin.
  void keep_busy(Stream on) {
    calls.hold(on);
    runtime->record_event(work, on);
  }
  /// A block of the stream is allocated and freed: cached, with its order.
  std::uintptr_t cache(std::size_t bytes, Stream on) {
    Block* const block = allocate(bytes, on);
    const std::uintptr_t at = address(block);
    allocator->free(block);
    calls.clear_calls();
    return at;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const RecordedCall& call : calls.calls()) {
      names.push_back(call.name);
    }
    return names;
  }
  void expect_calls(const std::vector<std::string>& expected) const {
    if (names() != expected) {
      std::string seen;
      for (const std::string& name : names()) {
        seen += " " + name;
      }
      harness::fail(__FILE__, __LINE__, "the calls were" + seen);
    }
  }

  RecordingRuntime& calls;
  Stream a, b;
  Event work;
};

BlockInfo::State state_at(const Rig& rig, std::uintptr_t address) {
  for (const SegmentInfo& segment : rig.allocator->snapshot()) {
    for (const BlockInfo& block : segment.blocks) {
      if (address - block.address < block.bytes) {
        return block.state;
      }
    }
  }
  throw harness::Failure("no block there");
}

} // namespace

TEST(reuse_on_the_same_stream_makes_no_call) {
  Recorded rig;
  rig.cache(1000, rig.a);
  rig.calls.hold(rig.a);
  for (int i = 0; i < 10; ++i) {
    rig.allocator->free(rig.allocate(1000, rig.a));
  }
  rig.expect_calls({});
  rig.check();
}

TEST(another_stream_waits_for_one_event) {
  Recorded rig;
  const std::uintptr_t at = rig.cache(12 * MiB, rig.a);
  rig.calls.hold(rig.a);
  // Work is queued, so that the stream is not idle.
  Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, rig.a);
  rig.calls.clear_calls();
  Block* const block = rig.allocate(12 * MiB, rig.b);
  CHECK_EQ(rig.address(block), at);
  rig.expect_calls({"query_stream", "create_event", "record_event", "wait_event"});
  CHECK(rig.calls.calls()[2].stream == rig.a);
  CHECK(rig.calls.calls()[3].stream == rig.b);
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 1);
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 0);
  rig.allocator->free(block);
  rig.runtime->destroy_event(work);
}

TEST(events_are_used_again) {
  Recorded rig;
  const Event work = rig.runtime->create_event(0, false);
  rig.cache(12 * MiB, rig.a);
  for (int i = 0; i < 5; ++i) {
    for (const auto& [from, to] : {std::pair(rig.a, rig.b), std::pair(rig.b, rig.a)}) {
      rig.calls.hold(from);
      rig.runtime->record_event(work, from);
      rig.allocator->free(rig.allocate(12 * MiB, to));
      rig.calls.release(from);
    }
  }
  CHECK_EQ(rig.calls.count("create_event"), std::size_t{2}); // each stream keeps its last one, to share it
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 10);
  rig.runtime->destroy_event(work);
}

TEST(an_idle_stream_needs_no_event) {
  Recorded rig;
  const std::uintptr_t at = rig.cache(12 * MiB, rig.a);
  Block* const block = rig.allocate(12 * MiB, rig.b);
  CHECK_EQ(rig.address(block), at);
  rig.expect_calls({"query_stream"});
  rig.allocator->free(block);
}

TEST(a_stream_prefers_what_it_had_itself) {
  Recorded rig;
  Block* const of_a = rig.allocate(12 * MiB, rig.a);
  Block* const of_b = rig.allocate(14 * MiB, rig.b);
  const std::uintptr_t at = rig.address(of_b);
  rig.allocator->free(of_a);
  rig.allocator->free(of_b);
  rig.calls.clear_calls();
  Block* const block = rig.allocate(12 * MiB, rig.b); // the block of `a` fits better, and costs a query
  CHECK_EQ(rig.address(block), at);
  rig.expect_calls({});
  rig.allocator->free(block);
}

TEST(a_piece_taken_by_another_stream_leaves_the_rest_with_the_first) {
  Recorded rig;
  const std::uintptr_t at = rig.cache(64 * MiB, rig.a);
  Block* const piece = rig.allocate(12 * MiB, rig.b);
  CHECK_EQ(rig.address(piece), at);
  rig.calls.clear_calls();
  Block* const rest = rig.allocate(52 * MiB, rig.a);
  CHECK_EQ(rig.address(rest), at + 12 * MiB);
  rig.expect_calls({});
  rig.allocator->free(piece); // free neighbours of two streams stay apart
  rig.allocator->free(rest);
  CHECK_EQ(rig.allocator->snapshot().at(0).blocks.size(), std::size_t{2});
  rig.check();
}

TEST(the_host_waits_before_it_takes_a_block_of_a_stream) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.allocator->set_home(block, Location::host(), rig.a); // used there in place, by the device
  rig.allocator->free(block);
  rig.calls.hold(rig.a);
  const Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, rig.a);
  rig.calls.clear_calls();
  Block* const taken = rig.allocator->allocate(12 * MiB, Location::host(), Stream::host());
  CHECK_EQ(rig.address(taken), at);
  rig.expect_calls({"query_stream", "synchronize_stream"});
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 1);
  CHECK_EQ(rig.allocator->statistics(Location::host()).num_host_waits, 1);
  CHECK(rig.runtime->query_event(work));
  rig.allocator->free(taken);
  rig.runtime->destroy_event(work);
}

TEST(a_block_of_the_host_needs_no_order) {
  Recorded rig;
  rig.allocator->free(rig.allocator->allocate(12 * MiB, Location::host(), Stream::host()));
  rig.calls.clear_calls();
  Block* const block = rig.allocator->allocate(12 * MiB, Location::host(), rig.a);
  rig.expect_calls({});
  rig.allocator->free(block);
}

TEST(the_host_waits_for_devices_that_exclude_it_before_it_gets_any_block) {
  struct Exclusive final : RecordingRuntime {
    Exclusive() : RecordingRuntime(2) {}
    DeviceProperties device_properties(int device) const override {
      DeviceProperties properties = RecordingRuntime::device_properties(device);
      properties.concurrent_managed_access = device == 0;
      return properties;
    }
  };
  Rig rig(std::make_unique<Exclusive>(), true);
  auto& runtime = static_cast<RecordingRuntime&>(*rig.runtime);
  const auto waited = [&] { return runtime.count("synchronize_device"); };
  rig.allocator->free(rig.allocate(MiB));
  CHECK_EQ(waited(), std::size_t{0}); // no business of the host's
  for (std::size_t turn = 1; turn <= 2; ++turn) { // a fresh segment, and one from the cache
    rig.allocator->free(rig.allocator->allocate(MiB, Location::host(), Stream::host()));
    CHECK_EQ(waited(), turn);
  }
  for (const RecordedCall& call : runtime.calls()) {
    CHECK(call.name != "synchronize_device" || call.location == Location::device(1));
  }
  runtime.fail("synchronize_device", 1);
  CHECK_THROWS(RuntimeFailure, rig.allocator->allocate(MiB, Location::host(), Stream::host()));
  rig.check();
}

TEST(a_recorded_stream_is_waited_for) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.allocator->record_stream(block, rig.b);
  rig.allocator->record_stream(block, rig.b);
  rig.keep_busy(rig.b);
  rig.calls.clear_calls();
  rig.allocator->free(block);
  rig.expect_calls({}); // nobody needs it yet
  CHECK(state_at(rig, at) == BlockInfo::State::kPendingFree);
  CHECK_EQ(rig.allocator->statistics().active_bytes[0].current, static_cast<std::int64_t>(12 * MiB));
  CHECK_EQ(rig.allocator->statistics().allocated_bytes[0].current, 0);
  Block* const elsewhere = rig.allocate(12 * MiB, rig.a);
  CHECK(rig.address(elsewhere) != at);
  CHECK_EQ(rig.calls.count("record_event"), std::size_t{1});
  rig.check();
  rig.calls.release(rig.b);
  Block* const again = rig.allocate(12 * MiB, rig.a);
  CHECK_EQ(rig.address(again), at);
  CHECK_EQ(rig.allocator->statistics().active_bytes[0].peak, static_cast<std::int64_t>(24 * MiB));
  rig.check();
  rig.allocator->free(elsewhere);
  rig.allocator->free(again);
}

TEST(the_stream_a_block_had_before_it_moved_is_waited_for) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.keep_busy(rig.a);
  rig.keep_busy(rig.b);
  rig.allocator->set_home(block, kDevice, rig.b);
  rig.allocator->set_home(block, Location::host(), Stream::host());
  rig.allocator->free(block);
  CHECK(state_at(rig, at) == BlockInfo::State::kPendingFree);
  rig.allocator->free(rig.allocate(512, rig.a)); // records
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 2);
  rig.calls.release(rig.a);
  rig.allocator->free(rig.allocate(512, rig.a)); // polls
  CHECK(state_at(rig, at) == BlockInfo::State::kPendingFree);
  rig.calls.release(rig.b);
  Block* const taken = rig.allocator->allocate(12 * MiB, Location::host(), Stream::host());
  CHECK_EQ(rig.address(taken), at);
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 0);
  rig.allocator->free(taken);
  rig.check();
}

TEST(a_block_that_returns_to_its_stream_needs_no_event) {
  Recorded rig;
  Block* const block = rig.allocate(12 * MiB, rig.a);
  rig.allocator->set_home(block, Location::host(), Stream::host());
  rig.allocator->set_home(block, kDevice, rig.a);
  rig.calls.clear_calls();
  rig.allocator->free(block);
  rig.expect_calls({});
  rig.check();
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

TEST(an_event_that_cannot_be_recorded_costs_a_block_until_the_device_is_waited_for) {
  for (const char* call : {"create_event", "record_event"}) {
    Recorded rig;
    Block* const block = rig.allocate(12 * MiB, rig.a);
    const std::uintptr_t at = rig.address(block);
    rig.allocator->record_stream(block, rig.b);
    rig.keep_busy(rig.b);
    rig.calls.fail(call, 1);
    rig.allocator->free(block);
    rig.check();
    Block* const other = rig.allocate(12 * MiB, rig.a);
    CHECK(rig.address(other) != at);
    CHECK(state_at(rig, at) == BlockInfo::State::kPendingFree);
    rig.calls.clear_calls();
    CHECK_EQ(rig.allocator->empty_cache(), 12 * MiB);
    CHECK_EQ(rig.calls.count("synchronize_device"), std::size_t{1});
    rig.allocator->free(other);
    rig.check();
  }
}

TEST(a_fresh_segment_is_populated_by_one_prefetch) {
  Recorded rig;
  Block* const block = rig.allocate(3 * MiB, rig.a);
  rig.expect_calls({"allocate_managed", "prefetch"});
  const RecordedCall prefetch = rig.calls.calls().back();
  CHECK_EQ(prefetch.bytes, kMediumSegment);
  CHECK(prefetch.location == kDevice);
  CHECK(prefetch.stream == rig.a);
  rig.calls.clear_calls();
  rig.allocator->free(block);
  rig.allocator->free(rig.allocate(3 * MiB, rig.a));
  Block* const of_host = rig.allocator->allocate(3 * MiB, Location::host(), Stream::host());
  rig.expect_calls({"allocate_managed"}); // the host populates by touching
  rig.allocator->free(of_host);
  rig.calls.clear_calls();
  Block* const no_stream = rig.allocator->allocate(12 * MiB, kDevice, Stream::host());
  rig.expect_calls({"allocate_managed", "prefetch"});
  CHECK(rig.calls.calls().back().stream == kStream);
  rig.allocator->free(no_stream);
}

TEST(populating_can_be_turned_off) {
  Recorded rig(AllocatorOptions{.populate = false});
  rig.allocator->free(rig.allocate(3 * MiB, rig.a));
  CHECK_EQ(rig.calls.count("prefetch"), std::size_t{0});
}

TEST(a_prefetch_that_fails_costs_nothing_but_faults) {
  Recorded rig;
  rig.calls.fail("prefetch", 1);
  Block* const block = rig.allocate(3 * MiB, rig.a);
  CHECK(block != nullptr);
  CHECK_EQ(rig.allocator->statistics().num_populate_failures, 1);
  rig.check();
  rig.allocator->free(block);
}

TEST(what_a_device_cannot_hold_is_not_sent_there) {
  Recorded rig;
  const std::size_t all = rig.runtime->device_properties(0).total_memory;
  rig.allocator->free(rig.allocate(all, rig.a));
  CHECK_EQ(rig.calls.count("prefetch"), std::size_t{1});
  rig.allocator->free(rig.allocate(all + 1, rig.a));
  CHECK_EQ(rig.calls.count("prefetch"), std::size_t{1});
  CHECK_EQ(rig.allocator->statistics().num_populate_failures, 0);
}

TEST(device_memory_is_not_prefetched) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  rig.allocator->free(rig.allocate(3 * MiB));
  CHECK_EQ(static_cast<RecordingRuntime&>(*rig.runtime).count("prefetch"), std::size_t{0});
}

TEST(the_failure_path_goes_from_cheap_to_dear) {
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
  // Recorded and polled in vain, refused by the limit (the runtime is not asked), waited for, given back, refused
  // again.
  const std::vector<std::string> expected{"query_stream", "create_event",      "record_event", "query_event",
                                          "query_event",  "synchronize_event", "free_managed", "free_managed"};
  CHECK(callback.before == expected);
  rig.expect_calls(expected); // the callback had nothing to give: no second round
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

TEST(blocks_that_go_from_stream_to_stream_in_a_batch_share_an_event) {
  Recorded rig;
  const Stream c = rig.stream();
  constexpr int kBlocks = 12;
  std::vector<Block*> blocks;
  for (int i = 0; i < kBlocks; ++i) {
    blocks.push_back(rig.allocate(12 * MiB, rig.a));
  }
  rig.keep_busy(rig.a);
  rig.calls.clear_calls();
  for (Block* const block : std::exchange(blocks, {})) {
    rig.allocator->free(block);
  }
  rig.expect_calls({});
  for (int i = 0; i < kBlocks / 2; ++i) {
    blocks.push_back(rig.allocate(12 * MiB, rig.b));
  }
  rig.expect_calls({"query_stream", "create_event", "record_event", "wait_event"});
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 1);
  rig.calls.clear_calls();
  for (int i = 0; i < kBlocks / 2 - 1; ++i) {
    blocks.push_back(rig.allocate(12 * MiB, c)); // what was recorded for b is as good for c
  }
  rig.expect_calls({"query_stream", "wait_event"});
  CHECK(rig.calls.calls().back().stream == c);
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 1);
  // What is freed later may be touched by later work: it takes another event, which serves the last one of the batch.
  Block* const later = rig.allocate(14 * MiB, rig.a);
  rig.allocator->free(later);
  rig.calls.clear_calls();
  blocks.push_back(rig.allocate(14 * MiB, rig.b));
  rig.expect_calls({"query_stream", "record_event", "wait_event"});
  blocks.push_back(rig.allocate(12 * MiB, rig.b));
  CHECK_EQ(rig.calls.count("wait_event"), std::size_t{1});
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 2);
  rig.check();
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
}

TEST(a_stream_that_was_seen_idle_is_not_asked_again) {
  Recorded rig;
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(rig.allocate(12 * MiB, rig.a));
  }
  for (Block* const block : std::exchange(blocks, {})) {
    rig.allocator->free(block);
  }
  rig.calls.clear_calls();
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(rig.allocate(12 * MiB, rig.b));
  }
  rig.expect_calls({"query_stream"});
  Block* const later = rig.allocate(12 * MiB, rig.a); // of what was filed before, nothing is left
  rig.allocator->free(later);
  rig.calls.clear_calls();
  blocks.push_back(rig.allocate(12 * MiB, rig.b));
  rig.expect_calls({"query_stream"});
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
}

TEST(nothing_is_known_of_streams_after_the_cache_was_emptied) {
  Recorded rig;
  Block* const held = rig.allocate(512, rig.a);
  rig.allocator->free(rig.allocate(1024, rig.a));
  rig.allocator->free(rig.allocate(1024, rig.b)); // seen idle
  rig.allocator->free(rig.allocate(2048, rig.a));
  rig.allocator->empty_cache();
  rig.calls.clear_calls();
  rig.allocator->free(rig.allocate(2048, rig.b));
  rig.expect_calls({"query_stream"}); // "a" may be another stream by now
  rig.allocator->free(held);
}

TEST(blocks_freed_in_a_batch_share_an_event_of_each_stream_that_used_them) {
  Recorded rig;
  const Stream c = rig.stream();
  std::vector<Block*> blocks;
  for (int i = 0; i < 10; ++i) {
    Block* const block = blocks.emplace_back(rig.allocate(12 * MiB, rig.a));
    rig.allocator->record_stream(block, rig.b);
    if (i % 2 == 0) {
      rig.allocator->record_stream(block, c);
    }
  }
  rig.keep_busy(c);
  rig.calls.clear_calls();
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  rig.expect_calls({});
  rig.check();
  Block* const one = rig.allocate(12 * MiB, rig.a);
  CHECK_EQ(rig.calls.count("record_event"), std::size_t{1}); // b has nothing queued
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 1);
  CHECK_EQ(rig.allocator->levels(kDevice).active[0], std::int64_t{6}); // those of c, and this one
  rig.check();
  rig.calls.release(c);
  Block* const two = rig.allocate(512, rig.a);
  CHECK_EQ(rig.allocator->levels(kDevice).active[0], std::int64_t{2}); // these two
  rig.check();
  rig.allocator->free(one);
  rig.allocator->free(two);
}

HARNESS_MAIN()
