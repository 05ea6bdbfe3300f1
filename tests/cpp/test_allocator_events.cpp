// Events that the allocator records: their reuse, their sharing by the blocks of a batch, and the failure to record
// one.
#include <utility>
#include <vector>

#include "recorded_rig.h"

using namespace contract;

TEST(events_are_reused) {
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
  CHECK_EQ(rig.calls.count("create_event"), std::size_t{2}); // each stream keeps its last event for sharing
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 10);
  rig.runtime->destroy_event(work);
}

TEST(a_block_without_an_event_is_pending_until_a_device_synchronisation) {
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

TEST(a_block_that_no_work_touches_is_reused_without_a_call) {
  Recorded rig;
  Block* const block = rig.allocate(64 * KiB, rig.a);
  Block* const next = rig.allocate(64 * KiB, rig.a);
  const std::uintptr_t at = rig.address(block);
  rig.keep_busy(rig.a); // with work on other memory
  rig.calls.clear_calls();
  rig.allocator->free_idle(block, rig.a);
  rig.check();
  Block* const again = rig.allocate(64 * KiB, rig.b);
  CHECK_EQ(rig.address(again), at);
  rig.expect_calls({});
  rig.allocator->free(again);
  rig.allocator->free(next);
  rig.check();
}

TEST(a_block_that_no_work_touches_is_ordered_with_what_it_merges_with) {
  for (const int first : {0, 1, 2}) { // the one whose stream is busy; the others are idle
    Recorded rig;
    std::vector<Block*> blocks;
    for (int i = 0; i < 4; ++i) {
      blocks.push_back(rig.allocate(64 * KiB, rig.a));
    }
    CHECK_EQ(rig.address(blocks[2]), rig.address(blocks[0]) + 128 * KiB);
    const std::uintptr_t at = rig.address(blocks[0]);
    rig.keep_busy(rig.a);
    rig.calls.clear_calls();
    for (const int each : {first, (first + 1) % 3, (first + 2) % 3}) {
      Block* const block = blocks[static_cast<std::size_t>(each)];
      each == first ? rig.allocator->free(block) : rig.allocator->free_idle(block, rig.a);
      rig.check();
    }
    Block* const all = rig.allocate(192 * KiB, rig.b);
    CHECK_EQ(rig.address(all), at);
    rig.expect_calls({"query_stream", "create_event", "record_event", "wait_event"});
    rig.allocator->free(all);
    rig.allocator->free(blocks[3]);
    rig.check();
  }
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
    blocks.push_back(rig.allocate(12 * MiB, c)); // the event recorded for b also serves c
  }
  rig.expect_calls({"query_stream", "wait_event"});
  CHECK(rig.calls.calls().back().stream == c);
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 1);
  // Later work may access a block that is freed later, so a new event is needed. That event also serves the last block
  // of the batch.
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
  CHECK_EQ(rig.calls.count("record_event"), std::size_t{1}); // nothing is queued on b
  CHECK_EQ(rig.allocator->statistics().num_events_recorded, 1);
  CHECK_EQ(rig.allocator->statistics(kDevice).active[0].current, std::int64_t{6}); // the blocks of c, and this one
  rig.check();
  rig.calls.release(c);
  Block* const two = rig.allocate(512, rig.a);
  CHECK_EQ(rig.allocator->statistics(kDevice).active[0].current, std::int64_t{2}); // these two blocks
  rig.check();
  rig.allocator->free(one);
  rig.allocator->free(two);
}

HARNESS_MAIN()
