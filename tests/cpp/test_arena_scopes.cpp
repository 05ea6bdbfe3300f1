// The arena's resets and marks: the memory that they release, allocations that outlive them, and waits for other
// streams.
#include "arena_rig.h"

using namespace face;

// --- reset --------------------------------------------------------------------------------------------------

TEST(the_second_iteration_makes_no_upstream_call) {
  ArenaRig rig;
  const auto iteration = [&] {
    std::vector<Allocation> held;
    for (std::size_t i = 0; i < 300; ++i) {
      held.push_back(rig.allocate(1 + i * 40));
    }
    for (const Allocation& allocation : held) {
      rig.arena.free(allocation);
    }
    CHECK(rig.arena.reset() == kNothing);
    return address(held.front());
  };
  iteration();
  CHECK(rig.asked() > 3); // several chained blocks,
  const std::uintptr_t at = iteration();
  CHECK_EQ(rig.blocks(), 1); // merged into one
  const std::int64_t asked = rig.asked();
  rig.calls().clear_calls();
  for (int turn = 0; turn < 5; ++turn) {
    CHECK_EQ(iteration(), at);
  }
  CHECK_EQ(rig.asked(), asked);
  CHECK_EQ(rig.calls().calls().size(), std::size_t{0});
}

TEST(an_allocation_that_outlives_a_reset_keeps_its_block) {
  ArenaRig rig;
  const Allocation kept = rig.allocate(1000), also = rig.allocate(24);
  rig.bump(5000);
  fill(kept, 9);
  CHECK((rig.arena.reset() == Outlived{2, 1024}));
  CHECK_EQ(rig.blocks(), 1);
  const Allocation next = rig.allocate(60 * KiB); // from another block
  fill(next, 1);
  CHECK(!overlap(kept, next));
  CHECK_EQ(rig.blocks(), 2);
  CHECK((rig.arena.reset() == Outlived{1, 60 * KiB})); // the earlier allocations were counted by the first reset
  rig.arena.free(next);
  CHECK_EQ(rig.blocks(), 1);
  expect_filled(kept, 9);
  rig.arena.free(kept);
  CHECK_EQ(rig.blocks(), 1);
  rig.arena.free(also); // the last allocation of the block
  CHECK_EQ(rig.blocks(), 0);
  CHECK_EQ(rig.arena.figures().reserved_bytes, 0);
}

TEST(a_retired_block_is_released_with_its_last_allocation) {
  ArenaRig rig;
  const Allocation outside = rig.allocate(100);
  rig.arena.push();
  const Allocation inside = rig.allocate(200);
  CHECK((rig.arena.reset() == Outlived{2, 300}));
  rig.arena.free(inside);
  CHECK_EQ(rig.blocks(), 1);
  fill(outside, 2);
  rig.arena.free(outside);
  CHECK_EQ(rig.blocks(), 0);
}

TEST(an_allocation_that_outlives_each_reset_does_not_grow_the_arena) {
  ArenaRig rig;
  Allocation loss;
  std::int64_t reserved = 0;
  for (int turn = 0; turn < 40; ++turn) {
    for (int i = 0; i < 50; ++i) {
      rig.bump(6000);
    }
    const Allocation next = rig.allocate(4);
    rig.arena.free(std::exchange(loss, next));
    CHECK((rig.arena.reset() == Outlived{1, 4}));
    if (turn == 4) {
      reserved = rig.arena.figures().peak_reserved_bytes;
    }
  }
  CHECK_EQ(rig.arena.figures().peak_reserved_bytes, reserved);
  rig.arena.free(loss);
}

TEST(a_release_frees_unused_blocks) {
  ArenaRig rig;
  rig.bump(40 * KiB);
  const Allocation held = rig.allocate(40 * KiB); // from the second block
  CHECK_EQ(rig.arena.release(), 64 * KiB);
  CHECK_EQ(rig.blocks(), 1);
  const std::uintptr_t next = rig.at();
  CHECK_EQ(next, address(held) + 40 * KiB);
  rig.arena.free(held);
  CHECK_EQ(rig.arena.release(), 128 * KiB);
  CHECK_EQ(rig.arena.release(), std::size_t{0});
  CHECK_EQ(rig.blocks(), 0);
}

TEST(after_a_release_the_first_block_has_the_needed_size) {
  ArenaRig rig;
  for (int i = 0; i < 4; ++i) {
    rig.bump(60 * KiB);
  }
  const std::size_t needed = rig.arena.release();
  CHECK(needed > 4 * 60 * KiB);
  rig.bump(1);
  CHECK_EQ(rig.arena.figures().reserved_bytes, static_cast<std::int64_t>(needed));
}

// --- marks --------------------------------------------------------------------------------------------------

TEST(a_pop_restores_the_top_of_its_push) {
  ArenaRig rig;
  const Stream other = rig.stream();
  const Allocation before = rig.allocate(1000);
  fill(before, 1);
  const std::uintptr_t at = rig.at();
  const Arena::Mark outer = rig.arena.push();
  rig.bump(3000);
  rig.bump(500, other);
  std::uintptr_t inside = rig.at();
  for (int turn = 0; turn < 3; ++turn) {
    const Arena::Mark inner = rig.arena.push();
    CHECK_EQ(rig.at(), inside + 256);
    rig.bump(7000);
    rig.arena.pop(rig.arena.push()); // an empty scope
    CHECK(rig.arena.pop(inner) == kNothing);
    CHECK_EQ(rig.at(), inside + 256);
    rig.arena.pop(rig.arena.push());
    const Arena::Mark last = rig.arena.push();
    CHECK(last != inner);
    rig.arena.pop(last);
    inside += 256; // the allocation that `at` made
  }
  rig.arena.pop(outer);
  CHECK_EQ(rig.at(), at + 256);
  expect_filled(before, 1);
  rig.arena.free(before);
}

TEST(a_scope_that_repeats_asks_the_upstream_once) {
  ArenaRig rig;
  rig.bump(50 * KiB);
  for (int turn = 0; turn < 4; ++turn) {
    const Arena::Mark mark = rig.arena.push();
    for (int i = 0; i < 8; ++i) {
      rig.bump(60 * KiB); // each needs a new block
    }
    CHECK(rig.arena.pop(mark) == kNothing);
  }
  const std::int64_t asked = rig.asked();
  for (int turn = 0; turn < 4; ++turn) {
    const Arena::Mark mark = rig.arena.push();
    for (int i = 0; i < 8; ++i) {
      rig.bump(60 * KiB);
    }
    rig.arena.pop(mark);
  }
  CHECK_EQ(rig.asked(), asked);
}

TEST(an_allocation_that_outlives_a_pop_keeps_its_address) {
  ArenaRig rig;
  rig.bump(1000);
  const Arena::Mark outer = rig.arena.push();
  rig.bump(1000);
  const Arena::Mark inner = rig.arena.push();
  rig.bump(1000);
  const Allocation kept = rig.allocate(700);
  fill(kept, 4);
  const Arena::Mark innermost = rig.arena.push();
  rig.bump(4000);
  CHECK(rig.arena.pop(innermost) == kNothing);
  CHECK_EQ(rig.at(), address(kept) + 768);
  CHECK((rig.arena.pop(inner) == Outlived{1, 700}));
  CHECK(rig.at() > address(kept)); // it belongs to the outer scope now
  CHECK((rig.arena.pop(outer) == Outlived{1, 700}));
  CHECK(rig.at() > address(kept));
  expect_filled(kept, 4);
  rig.arena.free(kept);
  CHECK(rig.arena.reset() == kNothing);
  CHECK_EQ(rig.blocks(), 1);
}

TEST(an_allocation_that_outlived_a_scope_does_not_count_in_the_next) {
  ArenaRig rig;
  const Arena::Mark first = rig.arena.push();
  const Allocation kept = rig.allocate(700);
  CHECK((rig.arena.pop(first) == Outlived{1, 700}));
  const Arena::Mark second = rig.arena.push();
  rig.bump(100);
  CHECK(rig.arena.pop(second) == kNothing);
  const Arena::Mark third = rig.arena.push();
  rig.arena.free(kept);
  CHECK(rig.arena.pop(third) == kNothing);
  CHECK(rig.at() > address(kept)); // it belongs to the outermost scope, which ends with a reset
}

TEST(memory_freed_after_an_inner_pop_is_reused_after_the_outer_pop) {
  ArenaRig rig;
  const Arena::Mark outer = rig.arena.push();
  const std::uintptr_t at = rig.at();
  const Arena::Mark inner = rig.arena.push();
  const Allocation kept = rig.allocate(700);
  CHECK((rig.arena.pop(inner) == Outlived{1, 700}));
  rig.arena.free(kept);
  CHECK(rig.arena.pop(outer) == kNothing);
  CHECK_EQ(rig.at(), at);
}

TEST(a_scope_may_free_earlier_allocations) {
  ArenaRig rig;
  const Allocation before = rig.allocate(700);
  const Arena::Mark mark = rig.arena.push();
  const Allocation inside = rig.allocate(100);
  rig.arena.free(before);
  CHECK((rig.arena.pop(mark) == Outlived{1, 100})); // one, although the number of live allocations is unchanged
  rig.arena.free(inside);
}

TEST(marks_are_popped_in_order) {
  ArenaRig rig;
  const auto refused = [&](Arena::Mark mark, const std::string& why) {
    try {
      rig.arena.pop(mark);
      harness::fail(__FILE__, __LINE__, "it was popped");
    } catch (const InvalidArgument& error) {
      CHECK(std::string(error.what()).find("mark " + std::to_string(mark)) != std::string::npos);
      CHECK(std::string(error.what()).find(why) != std::string::npos);
    }
  };
  refused(1, "not open");
  const Arena::Mark outer = rig.arena.push(), inner = rig.arena.push();
  refused(outer, "mark " + std::to_string(inner) + " comes first");
  rig.arena.pop(inner);
  refused(inner, "not open");
  rig.arena.reset(); // closes all open marks
  refused(outer, "not open");
}

// --- other streams --------------------------------------------------------------------------------------------

TEST(another_stream_is_waited_for_by_one_event) {
  ArenaRig rig;
  const Stream a = rig.stream(), b = rig.stream(), c = rig.stream();
  const std::uintptr_t of_a = rig.at(a), of_c = rig.at(c);
  for (const Stream own : {a, c}) {
    for (int i = 0; i < 10; ++i) {
      const Allocation shared = rig.allocate(100, own);
      rig.arena.record_stream(shared, b);
      rig.arena.free(shared);
    }
  }
  const Event work = rig.busy(b);
  rig.calls().clear_calls();
  CHECK(rig.arena.reset() == kNothing);
  CHECK_EQ(rig.calls().count("record_event"), std::size_t{1});
  CHECK_EQ(rig.calls().count("wait_event"), std::size_t{2}); // one for each chain
  CHECK_EQ(rig.arena.figures().events_recorded, 1);
  CHECK(!rig.runtime->query_event(work)); // the host did not wait
  CHECK_EQ(rig.at(a), of_a);
  CHECK_EQ(rig.at(c), of_c);
  for (const Stream own : {a, c}) {
    CHECK(!rig.runtime->query_event(rig.mark(own)));
  }
  rig.calls().clear_calls();
  rig.arena.reset(); // b was not recorded since
  CHECK_EQ(rig.calls().calls().size(), std::size_t{0});
}

TEST(the_chains_own_stream_and_the_host_need_no_event) {
  ArenaRig rig;
  const Stream a = rig.stream();
  const Allocation own = rig.allocate(100, a);
  rig.arena.record_stream(own, a);
  rig.arena.record_stream(own, Stream::host());
  rig.arena.free(own);
  rig.busy(a);
  rig.calls().clear_calls();
  rig.arena.reset();
  CHECK_EQ(rig.calls().calls().size(), std::size_t{0});
}

TEST(an_idle_stream_needs_no_event) {
  ArenaRig rig;
  const Stream b = rig.stream();
  const Allocation shared = rig.allocate(100);
  rig.arena.record_stream(shared, b);
  rig.arena.free(shared);
  rig.arena.reset();
  CHECK_EQ(rig.arena.figures().events_recorded, 0);
  CHECK_EQ(rig.calls().count("create_event"), std::size_t{0});
}

TEST(the_host_waits_before_its_chain_is_used_again) {
  ArenaRig rig;
  const Allocation shared = rig.allocate(100, Stream::host());
  rig.arena.record_stream(shared, kStream);
  rig.arena.free(shared);
  const Event work = rig.busy(kStream);
  rig.arena.reset();
  CHECK(rig.runtime->query_event(work));
}

TEST(a_pop_waits_only_for_streams_of_its_scope) {
  ArenaRig rig;
  const Stream a = rig.stream(), b = rig.stream(), c = rig.stream();
  Allocation shared = rig.allocate(100, a);
  rig.arena.record_stream(shared, b);
  rig.arena.free(shared);
  rig.busy(b);
  const Arena::Mark first = rig.arena.push();
  rig.bump(100, a);
  rig.arena.pop(first);
  CHECK_EQ(rig.arena.figures().events_recorded, 0);
  const Arena::Mark second = rig.arena.push();
  shared = rig.allocate(100, a);
  rig.arena.record_stream(shared, c);
  rig.arena.free(shared);
  const Event work = rig.busy(c);
  rig.arena.pop(second);
  CHECK_EQ(rig.arena.figures().events_recorded, 1);
  CHECK(!rig.runtime->query_event(work) && !rig.runtime->query_event(rig.mark(a)));
}

TEST(the_upstream_orders_a_released_block_after_recorded_streams) {
  ArenaRig rig;
  const Stream a = rig.stream(), b = rig.stream();
  const Allocation kept = rig.allocate(12 * MiB, a);
  rig.arena.record_stream(kept, b);
  CHECK((rig.arena.reset() == Outlived{1, 12 * MiB}));
  const Event work = rig.busy(b);
  rig.arena.free(kept);
  CHECK_EQ(rig.blocks(), 0);
  expect_reuse_after(rig, work, kept, *rig.upstream, a);
}

TEST(memory_without_an_event_is_not_reused) {
  for (const char* const call : {"query_stream", "create_event", "record_event", "wait_event"}) {
    for (const bool scoped : {false, true}) {
      ArenaRig rig;
      const Stream a = rig.stream(), b = rig.stream();
      const Arena::Mark mark = rig.arena.push();
      const Allocation shared = rig.allocate(1000, a);
      rig.arena.record_stream(shared, b);
      rig.arena.free(shared);
      const Event work = rig.busy(b);
      rig.calls().fail(call, 1);
      CHECK((scoped ? rig.arena.pop(mark) : rig.arena.reset()) == kNothing);
      CHECK(rig.calls().count(call) > 0);
      expect_reuse_after(rig, work, shared, *rig.allocator, a);
      CHECK(!rig.runtime->query_event(work));
    }
  }
}

HARNESS_MAIN()
