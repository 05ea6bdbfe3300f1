// Making room under a cap: what is refused, given back, asked of the callback; allocation that only tries; tags,
// hand-overs, peaks.
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "allocator/size_classes.h"
#include "room_helpers.h"

using namespace contract;

TEST(a_hard_cap_is_named_in_the_refusal_and_never_exceeded) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB, true);
    CHECK_EQ(*rig.allocator->cap(0), 64 * MiB);
    CHECK(!rig.allocator->cap(1));
    Block* const held = rig.allocate(40 * MiB);
    try {
      rig.allocate(40 * MiB);
      harness::fail(__FILE__, __LINE__, "80 MiB fit in 64");
    } catch (const OutOfMemory& error) {
      CHECK(error.cause == OutOfMemory::Cause::kBudget);
      CHECK_EQ(error.bytes, 40 * MiB);
      CHECK(std::string(error.what()).find("budget of device 0 is 64.00 MiB") != std::string::npos);
    }
    rig.check();
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(64 * MiB));
    Block* const elsewhere = rig.allocate(40 * MiB, Stream::default_of(1)); // has no cap
    rig.allocator->set_cap(0, std::nullopt, true);
    Block* const now = rig.allocate(40 * MiB);
    for (Block* const block : {held, elsewhere, now}) {
      rig.allocator->free(block);
    }
  });
}

TEST(a_soft_cap_is_exceeded_when_nothing_can_be_freed_and_that_is_counted) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB, false);
    Block* const held = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics().num_over_cap, 0);
    Block* const over = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics(kDevice).num_over_cap, 1);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(80 * MiB));
    rig.allocator->free(over);
    rig.allocator->free(held);
    rig.check();
    rig.allocator->set_cap(0, 40 * MiB, false); // caches are given back to get there
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(40 * MiB));
  });
}

TEST(a_lower_cap_gives_caches_back_and_leaves_what_is_in_use) {
  on_each([](Rig& rig) {
    const Stream other = rig.stream();
    Block* const kept = rig.allocate(48 * MiB);
    Block* const pending = rig.allocate(16 * MiB);
    rig.allocator->record_stream(pending, other);
    rig.allocator->free(rig.allocate(32 * MiB));
    rig.allocator->free(pending);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(96 * MiB));
    rig.allocator->set_cap(0, 64 * MiB, true);
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(64 * MiB));
    rig.check();
    rig.allocator->set_cap(0, 20 * MiB, true);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(48 * MiB));
    rig.check();
    CHECK_THROWS(OutOfMemory, rig.allocate(2 * MiB));
    rig.allocator->free(kept);
    Block* const inside = rig.allocate(2 * MiB); // of what is there
    rig.allocator->free(inside);
    CHECK_THROWS(InvalidArgument, rig.allocator->set_cap(2, 1, true));
    CHECK_THROWS(InvalidArgument, rig.allocator->set_cap(-1, 1, true));
    CHECK_THROWS(InvalidArgument, rig.allocator->cap(2));
  });
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
  rig.allocator->set_cap(0, 64 * MiB + kForSmall, true);
  rig.allocator->set_pressure_callback(&callback);
  Block* const pending = rig.allocate(32 * MiB, a);
  for (int i = 0; i < 4; ++i) {
    callback.blocks.push_back(rig.allocate(8 * MiB, a));
  }
  rig.allocator->record_stream(pending, b);
  callback.runtime->hold(b);
  const Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, b);
  rig.allocator->free(pending); // 32 MiB that the host would have to wait for
  Block* const block = rig.allocate(32 * MiB, b);
  CHECK_EQ(callback.asked, std::size_t{1}); // one block was given up; then the host waited for what was pending
  CHECK_EQ(callback.waits_before, std::size_t{0});
  CHECK(callback.stream == b);
  CHECK_EQ(callback.runtime->count("synchronize_event"), std::size_t{1});
  callback.asked = 0;
  Block* const second = rig.allocate(32 * MiB, a); // block by block
  CHECK_EQ(callback.asked, std::size_t{3});
  callback.asked = 0;
  callback.always = true;
  CHECK_THROWS(OutOfMemory, rig.allocate(32 * MiB, a));
  CHECK(callback.asked > 3 && callback.asked < 100); // it says yes for ever, and is not believed
  rig.allocator->free(second);
  rig.allocator->free(block);
  rig.check();
  rig.runtime->destroy_event(work);
}

TEST(a_pressure_callback_may_let_one_request_exceed_a_hard_cap) {
  struct Callback final : PressureCallback {
    bool make_room(std::size_t, Location, Stream) override {
      return false;
    }
    bool may_exceed(std::size_t bytes, Location home) override {
      CHECK_EQ(bytes, 40 * MiB);
      CHECK(home == kDevice);
      CHECK(rig->allocator->is_valid()); // takes the lock
      return lets;
    }
    Rig* rig = nullptr;
    bool lets = false;
  } callback;
  on_each([&](Rig& rig) {
    callback.rig = &rig;
    rig.allocator->set_cap(0, 64 * MiB, true);
    rig.allocator->set_pressure_callback(&callback);
    Block* const held = rig.allocate(40 * MiB);
    callback.lets = false;
    CHECK_THROWS(OutOfMemory, rig.allocate(40 * MiB));
    callback.lets = true;
    CHECK(rig.allocator->try_allocate(40 * MiB, kDevice, kStream) == nullptr); // does not ask
    Block* const over = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics().num_over_cap, 1);
    rig.check();
    rig.allocator->free(over);
    rig.allocator->set_cap(0, 64 * MiB, true); // gives it back
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
    for (const bool hard : {true, false}) {
      rig.allocator->set_cap(0, 20 * MiB, hard);
      rig.allocator->set_pressure_callback(&callback);
      CHECK_THROWS(RuntimeFailure, rig.allocate(64 * MiB));
      rig.check();
      CHECK(rig.allocator->try_allocate(64 * MiB, kDevice, kStream) == nullptr); // does not call it
      rig.allocator->free(rig.allocate(12 * MiB)); // the lock is not left held
    }
  });
}

TEST(room_freed_in_one_class_serves_another) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB, true);
    std::map<std::size_t, Block*> small;
    std::size_t next = 1;
    while (Block* const block = rig.allocator->try_allocate(kSmallRequest, kDevice, kStream)) {
      rig.allocator->set_tag(block, tag_of(next));
      small[next++] = block;
    }
    CHECK_EQ(small.size(), std::size_t{64}); // the cap is full of small segments, two blocks each
    // No segment can hold it: whole ones are emptied, the cheaper ones, and given back.
    const auto run = rig.allocator->min_cost_range(
        16 * MiB, 0, [](void* tag, std::size_t) { return number_of(tag) <= 40 ? 5.0 : 1.0; });
    CHECK(run.has_value());
    CHECK_EQ(run->size(), std::size_t{16});
    for (void* const tag : *run) {
      CHECK(number_of(tag) > 40);
      rig.allocator->free(small.at(number_of(tag)));
      small.erase(number_of(tag));
    }
    rig.check();
    CHECK(rig.allocator->min_cost_range(16 * MiB, 0, by_bytes)->empty());
    Block* const large = rig.allocator->allocate(16 * MiB, kDevice, kStream);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(64 * MiB));
    rig.check();
    rig.allocator->free(large);
    // And back: small blocks of what was made for a large one.
    for (std::size_t i = 0; i < 16; ++i) {
      Block* const block = rig.allocator->try_allocate(kSmallRequest, kDevice, kStream);
      CHECK(block != nullptr);
      small[next++] = block;
    }
    CHECK(!rig.allocator->min_cost_range(16 * MiB, 0, [](void*, std::size_t) { return kNever; }));
    for (const auto& [number, block] : small) {
      rig.allocator->free(block);
    }
  });
}

TEST(under_a_hard_cap_one_segment_has_it_all) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  rig.allocator->set_cap(0, 256 * MiB + kForSmall, true);
  std::vector<Block*> blocks;
  for (int i = 0; i < 12; ++i) { // medium and large share them
    blocks.push_back(rig.allocate(3 * MiB + 5));
    blocks.push_back(rig.allocate(16 * MiB));
  }
  CHECK_EQ(rig.allocator->statistics().segment[0].current, 1);
  CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(256 * MiB));
  rig.check();
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  rig.allocator->empty_cache();
  Block* const more_than_half = rig.allocate(150 * MiB);
  CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(256 * MiB));
  rig.allocator->free(more_than_half);
}

TEST(where_the_source_refuses_room_is_what_others_give_up) {
  // A device with less memory than its cap: another program has the rest.
  EmulatedConfig config;
  config.memory = 64 * MiB;
  Rig rig(std::make_unique<EmulatedRuntime>(config), false);
  rig.allocator->set_cap(0, 256 * MiB, true);
  std::vector<Block*> blocks;
  while (Block* const block = rig.allocator->try_allocate(8 * MiB, kDevice, kStream)) {
    rig.allocator->set_tag(block, tag_of(blocks.size() + 1));
    blocks.push_back(block);
  }
  CHECK_EQ(blocks.size(), std::size_t{8});
  CHECK_EQ(rig.allocator->statistics().segment[0].current, 1); // half as large as was asked for first
  const auto run = rig.allocator->min_cost_range(16 * MiB, 0, by_bytes);
  CHECK(run.has_value());
  CHECK_EQ(run->size(), std::size_t{2}); // not: there is room under the cap
  for (void* const tag : *run) {
    rig.allocator->free(std::exchange(blocks[number_of(tag) - 1], nullptr));
  }
  Block* const block = rig.allocator->try_allocate(16 * MiB, kDevice, kStream);
  CHECK(block != nullptr);
  rig.allocator->free(block);
  for (Block* const left : blocks) {
    rig.allocator->free(left);
  }
}

TEST(a_tag_goes_with_its_block) {
  on_each([](Rig& rig) {
    const Stream other = rig.stream();
    Block* const block = rig.allocate(1000);
    rig.allocator->set_tag(block, tag_of(7));
    rig.allocator->record_stream(block, other);
    CHECK(rig.allocator->tag(block) == tag_of(7));
    rig.check();
    const std::uintptr_t at = rig.address(block);
    rig.allocator->free(block); // pending
    rig.check();
    rig.runtime->synchronize_device(0);
    Block* const again = rig.allocate(1000);
    CHECK_EQ(rig.address(again), at);
    CHECK(rig.allocator->tag(again) == nullptr);
    rig.allocator->free(again);
  });
}

TEST(a_block_freed_after_an_event_waits_for_that_alone) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream copies = rig.stream();
  Block* const block = rig.allocate(24 * MiB);
  const std::uintptr_t at = rig.address(block);
  calls.hold(copies);
  const Event ready = calls.create_event(0, false);
  calls.record_event(ready, copies);
  rig.allocator->free_after(block, ready, copies);
  rig.check();
  calls.clear_calls();
  // Both parts of it wait, each by itself.
  Block* const first = rig.allocate(12 * MiB);
  Block* const second = rig.allocate(12 * MiB);
  CHECK_EQ(rig.address(first), at);
  CHECK_EQ(rig.address(second), at + 12 * MiB);
  CHECK_EQ(calls.count("wait_event"), std::size_t{2});
  CHECK_EQ(calls.count("record_event"), std::size_t{0}); // which would be behind all that is queued
  rig.check();
  rig.allocator->free(first);
  calls.release(copies);
  rig.allocator->free(second);
  Block* const again = rig.allocate(24 * MiB);
  CHECK_EQ(rig.address(again), at); // one piece again
  CHECK_EQ(calls.count("wait_event"), std::size_t{2});
  rig.allocator->free(again);
  rig.check();
}

TEST(a_block_freed_after_an_event_that_is_reached_waits_for_nothing) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream copies = rig.stream();
  Block* const block = rig.allocate(16 * MiB);
  const Event ready = calls.create_event(0, false);
  calls.record_event(ready, copies);
  rig.allocator->free_after(block, ready, copies);
  calls.hold(copies); // what is queued from now on is none of its business
  calls.clear_calls();
  rig.allocator->free(rig.allocate(16 * MiB));
  CHECK_EQ(calls.count("wait_event"), std::size_t{0});
  calls.release(copies);
}

// --- trying -------------------------------------------------------------------------------------------------------

TEST(trying_never_waits_and_never_asks) {
  struct Callback final : PressureCallback {
    bool make_room(std::size_t, Location, Stream) override {
      ++asked;
      return false;
    }
    int asked = 0;
  } callback;
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream a = rig.stream(), b = rig.stream();
  rig.allocator->set_pressure_callback(&callback);
  rig.runtime->set_limit(64 * MiB);
  Block* const shared = rig.allocate(20 * MiB, a);
  Block* const host = rig.allocate(20 * MiB, a);
  rig.allocator->set_home(host, Location::host(), a);
  rig.allocator->record_stream(shared, b);
  for (const Stream stream : {a, b}) {
    calls.hold(stream);
    rig.runtime->prefetch(rig.allocator->data(host), 20 * MiB, kDevice, stream);
  }
  rig.allocator->free(shared); // pending
  rig.allocator->free(host); // the host would have to wait for `a`
  CHECK(rig.allocator->try_allocate(20 * MiB, Location::host(), Stream::host()) != nullptr); // of what the limit leaves
  CHECK(rig.allocator->try_allocate(20 * MiB, Location::host(), Stream::host()) == nullptr);
  CHECK(rig.allocator->try_allocate(64 * MiB, kDevice, a) == nullptr);
  CHECK(rig.allocator->try_allocate(~std::size_t{0}, kDevice, a) == nullptr);
  CHECK(rig.allocator->try_allocate(0, kDevice, a) == nullptr);
  CHECK_THROWS(InvalidArgument, rig.allocator->try_allocate(1, Location::device(1), a));
  CHECK_THROWS(InvalidArgument, rig.allocator->try_allocate(1, kDevice, Stream{1, nullptr}));
  for (const RecordedCall& call : calls.calls()) {
    CHECK(!call.name.starts_with("synchronize"));
  }
  CHECK_EQ(callback.asked, 0);
  CHECK_EQ(rig.allocator->statistics().num_ooms, 0);
  CHECK_EQ(rig.allocator->statistics().num_host_waits, 0);
  rig.check();
  calls.release(a);
  Block* const now = rig.allocator->try_allocate(20 * MiB, Location::host(), Stream::host());
  CHECK(now != nullptr); // `a` is idle
  rig.allocator->free(now);
  for (const SegmentInfo& segment : rig.allocator->snapshot()) {
    for (const BlockInfo& block : segment.blocks) {
      if (block.state == BlockInfo::State::kAllocated) {
        rig.allocator->free(rig.allocator->find(reinterpret_cast<const void*>(block.address)));
      }
    }
  }
}

TEST(trying_gives_cached_segments_back_only_while_nothing_is_queued) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream a = rig.stream();
  std::vector<Block*> blocks;
  for (const std::size_t bytes : {16 * MiB, 20 * MiB, 24 * MiB}) {
    blocks.push_back(rig.allocate(bytes, a));
  }
  rig.allocator->set_cap(0, 60 * MiB, true);
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  const Event work = rig.runtime->create_event(0, false);
  calls.hold(a);
  rig.runtime->record_event(work, a);
  CHECK(rig.allocator->try_allocate(40 * MiB, kDevice, a) == nullptr); // giving back waits for `a`
  CHECK_EQ(calls.count("free_device"), std::size_t{0});
  calls.release(a);
  CHECK(rig.allocator->try_allocate(62 * MiB, kDevice, a) == nullptr); // would not do: nothing is given back in vain
  CHECK_EQ(calls.count("free_device"), std::size_t{0});
  Block* const block = rig.allocator->try_allocate(40 * MiB, kDevice, a);
  CHECK(block != nullptr);
  CHECK_EQ(calls.count("free_device"), std::size_t{2}); // the two largest are enough
  rig.allocator->free(block);
  rig.check();
  rig.runtime->destroy_event(work);
}

// --- hand-overs ---------------------------------------------------------------------------------------------------

TEST(a_block_handed_over_is_reused_on_its_new_stream_with_no_call) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream a = rig.stream(), b = rig.stream(), c = rig.stream();
  Block* const block = rig.allocate(12 * MiB, a);
  const std::uintptr_t at = rig.address(block);
  rig.allocator->record_stream(block, b);
  for (const Stream stream : {a, b, c}) {
    calls.hold(stream);
  }
  const Event work = rig.runtime->create_event(0, false);
  rig.runtime->record_event(work, a);
  calls.clear_calls();
  rig.allocator->hand_over(block, c);
  CHECK(rig.allocator->stream(block) == c);
  CHECK_EQ(rig.allocator->streams(block).size(), std::size_t{1});
  rig.check();
  rig.allocator->free(block);
  Block* const again = rig.allocator->try_allocate(12 * MiB, kDevice, c);
  CHECK_EQ(rig.address(again), at);
  CHECK(calls.calls().empty());
  rig.allocator->free(again);
  Block* const of_a = rig.allocate(12 * MiB, a); // which waits for `c`, and for nobody else
  CHECK_EQ(rig.address(of_a), at);
  CHECK_EQ(calls.count("query_stream"), std::size_t{1});
  CHECK(calls.calls().at(0).stream == c);
  CHECK_THROWS(InvalidArgument, rig.allocator->hand_over(of_a, Stream::default_of(7)));
  rig.allocator->free(of_a);
  CHECK_THROWS(InvalidArgument, rig.allocator->hand_over(nullptr, a));
  rig.runtime->destroy_event(work);
}

// --- peaks --------------------------------------------------------------------------------------------------------

TEST(the_peak_that_is_taken_and_the_one_of_the_statistics_do_not_disturb_each_other) {
  on_each([](Rig& rig) {
    const auto peak = [&] { return rig.allocator->statistics(kDevice).allocated_bytes[0].peak; };
    constexpr auto k = static_cast<std::int64_t>(MiB);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, std::size_t{0});
    Block* const kept = rig.allocate(12 * MiB);
    rig.allocator->free(rig.allocate(20 * MiB));
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 32 * MiB);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 12 * MiB); // what there still is
    CHECK_EQ(peak(), 32 * k);
    CHECK_EQ(rig.allocator->statistics(kDevice).active_bytes[0].peak, 32 * k);
    rig.allocator->free(rig.allocate(30 * MiB));
    rig.allocator->reset_peak_statistics(kDevice);
    CHECK_EQ(peak(), 12 * k);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 42 * MiB); // before the reset
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 12 * MiB);
    CHECK_EQ(peak(), 12 * k);
    CHECK_EQ(rig.allocator->take_allocated_peak(1).most, std::size_t{0});
    CHECK_THROWS(InvalidArgument, rig.allocator->take_allocated_peak(2));
    rig.allocator->free(kept);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, 12 * MiB);
    CHECK_EQ(rig.allocator->take_allocated_peak(0).most, std::size_t{0});
  });
}

TEST(the_count_of_changes_tells_whether_there_is_anything_to_ask) {
  on_each([](Rig& rig) {
    CachingManagedAllocator& allocator = *rig.allocator;
    const auto changed = [&] { return allocator.take_allocated_peak(0).changes != allocator.allocation_changes(0); };
    CHECK(!changed());
    const std::uint64_t before = allocator.allocation_changes(0);
    Block* const block = rig.allocate(12 * MiB);
    CHECK(allocator.allocation_changes(0) != before);
    const CachingManagedAllocator::AllocatedPeak peak = allocator.take_allocated_peak(0);
    CHECK_EQ(peak.now, 12 * MiB);
    CHECK_EQ(peak.changes, allocator.allocation_changes(0));
    allocator.reset_peak_statistics(kDevice); // of statistics: nothing was allocated
    CHECK_EQ(peak.changes, allocator.allocation_changes(0));
    allocator.free(block);
    CHECK(allocator.allocation_changes(0) != peak.changes);
    CHECK_EQ(allocator.take_allocated_peak(0).now, std::size_t{0});
    CHECK(!changed());
    CHECK_EQ(allocator.allocation_changes(1), std::uint64_t{0});
  });
}

HARNESS_MAIN()
