// Room under a cap: its ceiling, lowered caps, and freed blocks that make room for requests of another size.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "allocator/size_classes.h"
#include "room_helpers.h"

using namespace contract;

TEST(a_cap_is_named_in_the_refusal_and_never_exceeded) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB);
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
    Block* const elsewhere = rig.allocate(40 * MiB, Stream::default_of(1)); // another device, which has no cap
    rig.allocator->set_cap(0, std::nullopt);
    Block* const now = rig.allocate(40 * MiB);
    for (Block* const block : {held, elsewhere, now}) {
      rig.allocator->free(block);
    }
  });
}

TEST(a_permitted_excess_ends_at_the_ceiling) {
  struct Callback final : PressureCallback {
    bool make_room(std::size_t, Location, Stream) override {
      return false;
    }
    bool may_exceed(std::size_t, Location) override {
      return true;
    }
  } callback;
  on_each([&](Rig& rig) {
    rig.allocator->set_pressure_callback(&callback);
    rig.allocator->set_cap(0, 64 * MiB, 110 * MiB);
    Block* const held = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics().num_over_cap, 0);
    Block* const over = rig.allocate(40 * MiB);
    CHECK_EQ(rig.allocator->statistics(kDevice).num_over_cap, 1);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(104 * MiB - kForSmall));
    CHECK_THROWS(OutOfMemory, rig.allocate(30 * MiB));
    rig.allocator->free(over);
    rig.allocator->free(held);
    rig.check();
    rig.allocator->set_cap(0, 40 * MiB); // releases cached segments to comply
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(40 * MiB));
  });
}

TEST(under_a_cap_large_blocks_leave_the_beginning_of_a_segment_to_others) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB);
    Block* const large[] = {rig.allocate(20 * MiB), rig.allocate(20 * MiB)};
    Block* const medium = rig.allocate(2 * MiB);
    const auto at = [&](Block* block) { return reinterpret_cast<std::uintptr_t>(rig.allocator->data(block)); };
    CHECK_EQ(at(large[0]), at(large[1]) + 20 * MiB);
    CHECK(at(medium) < at(large[1]));
    for (Block* const block : {large[0], large[1], medium}) {
      rig.allocator->free(block);
    }
    rig.check();
  });
}

TEST(segments_grow_under_a_cap_that_is_its_ceiling) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 900 * MiB, 900 * MiB);
    std::vector<Block*> held{rig.allocate(2 * MiB)};
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(20 * MiB)); // others need not go without all of the device
    while (held.size() < 200) {
      held.push_back(rig.allocate(2 * MiB));
    }
    CHECK(rig.allocator->statistics(kDevice).num_device_alloc < 12);
    while (held.size() < 440) { // all of it serves requests
      held.push_back(rig.allocate(2 * MiB));
    }
    for (Block* const block : held) {
      rig.allocator->free(block);
    }
    rig.check();
  });
}

TEST(a_lower_cap_releases_caches_and_leaves_blocks_in_use) {
  on_each([](Rig& rig) {
    const Stream other = rig.stream();
    Block* const kept = rig.allocate(48 * MiB);
    Block* const pending = rig.allocate(16 * MiB);
    rig.allocator->record_stream(pending, other);
    rig.allocator->free(rig.allocate(32 * MiB));
    rig.allocator->free(pending);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(96 * MiB));
    rig.allocator->set_cap(0, 64 * MiB);
    CHECK(reserved_on(rig) <= static_cast<std::int64_t>(64 * MiB));
    rig.check();
    rig.allocator->set_cap(0, 20 * MiB);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(48 * MiB));
    rig.check();
    CHECK_THROWS(OutOfMemory, rig.allocate(2 * MiB));
    rig.allocator->free(kept);
    Block* const inside = rig.allocate(2 * MiB); // from the cached segment
    rig.allocator->free(inside);
    CHECK_THROWS(InvalidArgument, rig.allocator->set_cap(2, 1));
    CHECK_THROWS(InvalidArgument, rig.allocator->set_cap(-1, 1));
    CHECK_THROWS(InvalidArgument, rig.allocator->cap(2));
  });
}

TEST(memory_freed_by_one_size_class_serves_another) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB);
    std::map<std::size_t, Block*> small;
    std::size_t next = 1;
    while (Block* const block = rig.allocator->try_allocate(kSmallRequest, kDevice, kStream)) {
      rig.allocator->set_tag(block, tag_of(next));
      small[next++] = block;
    }
    CHECK_EQ(small.size(), std::size_t{64}); // small segments of two blocks each fill the cap
    // No single segment is large enough: the cheaper segments are evicted completely and released.
    const auto range = rig.allocator->min_cost_range(
        16 * MiB, 0, [](void* tag, std::size_t) { return number_of(tag) <= 40 ? 5.0 : 1.0; });
    CHECK(range.has_value());
    CHECK_EQ(range->size(), std::size_t{16});
    for (void* const tag : *range) {
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
    // And the reverse: small blocks from a segment that was made for a large one.
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

TEST(under_a_cap_one_segment_serves_all_sizes) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  rig.allocator->set_cap(0, 256 * MiB + 2 * kForSmall); // a 64th
  std::vector<Block*> blocks;
  for (int i = 0; i < 12; ++i) { // medium and large requests share the segments
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

TEST(under_a_cap_large_pages_waste_little_of_a_request) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  rig.allocator->set_cap(0, 1024 * MiB);
  const auto rounded = [&](std::size_t bytes) {
    Block* const block = rig.allocate(bytes);
    const std::size_t found = rig.allocator->bytes(block);
    rig.allocator->free(block);
    return found;
  };
  CHECK_EQ(rounded(64 * MiB - 4), 64 * MiB);
  CHECK_EQ(rounded(63 * MiB), 63 * MiB); // 1/63 of it would be wasted
  CHECK_EQ(rounded(65 * MiB), 66 * MiB);
  CHECK_EQ(rounded(13 * MiB + 1), 13 * MiB + 64 * KiB);
  CHECK_EQ(rounded(639 * MiB), 640 * MiB);
}

TEST(large_requests_leave_a_cap_a_share_for_segments_of_small_ones) {
  Rig rig(std::make_unique<RecordingRuntime>(1), false);
  constexpr std::size_t kShare = 16 * MiB; // 1/64 of the cap
  rig.allocator->set_cap(0, 1024 * MiB);
  std::vector<Block*> blocks;
  while (Block* const block = rig.allocator->try_allocate(8 * MiB, kDevice, kStream)) {
    rig.allocator->set_tag(block, tag_of(blocks.size() + 1));
    blocks.push_back(block);
  }
  CHECK_EQ(blocks.size(), (1024 * MiB - kShare) / (8 * MiB));
  CHECK_EQ(rig.allocator->unused(0), std::size_t{0});
  CHECK_EQ(rig.allocator->min_cost_range(8 * MiB, 0, by_bytes)->size(), std::size_t{1}); // the share does not serve it
  for (std::size_t bytes = 0; bytes < kShare - kSmallSegment; bytes += kSmallRequest) {
    blocks.push_back(rig.allocate(kSmallRequest)); // nothing has to go for them
  }
  for (const SegmentInfo& segment : rig.allocator->snapshot()) {
    CHECK_EQ(segment.bytes > kSmallSegment, segment.kind == PoolKind::kLarge);
  }
  rig.check();
  // If nothing can be evicted, a large request takes what is left.
  Block* const last = rig.allocate(kSmallSegment);
  CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(1024 * MiB));
  CHECK_THROWS(OutOfMemory, rig.allocate(kSmallSegment));
  rig.allocator->free(last);
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
}

TEST(large_requests_take_the_share_of_small_ones_when_it_is_given_up) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  CachingManagedAllocator& memory = *rig.allocator;
  const auto rest = [&] { return memory.try_allocate(kSmallSegment, kDevice, kStream); };
  memory.set_cap(0, 64 * MiB);
  std::vector<Block*> blocks{rig.allocate(64 * MiB - kSmallSegment)};
  CHECK(rest() == nullptr);
  memory.leave_none_for_small(0);
  memory.set_cap(0, 64 * MiB); // the same
  blocks.push_back(rest());
  CHECK(blocks.back() != nullptr);
  memory.set_cap(0, 64 * MiB + kSmallSegment);
  CHECK(rest() == nullptr);
  for (Block* const block : blocks) {
    memory.free(block);
  }
}

TEST(evictions_make_room_if_the_source_refuses) {
  // The device has less memory than its cap: another program uses the rest.
  EmulatedConfig config;
  config.memory = 64 * MiB;
  Rig rig(std::make_unique<EmulatedRuntime>(config), false);
  rig.allocator->set_cap(0, 256 * MiB);
  std::vector<Block*> blocks;
  while (Block* const block = rig.allocator->try_allocate(8 * MiB, kDevice, kStream)) {
    rig.allocator->set_tag(block, tag_of(blocks.size() + 1));
    blocks.push_back(block);
  }
  CHECK_EQ(blocks.size(), std::size_t{8});
  CHECK_EQ(rig.allocator->statistics().segment[0].current, 1); // half the size of the first attempt
  const auto range = rig.allocator->min_cost_range(16 * MiB, 0, by_bytes);
  CHECK(range.has_value());
  CHECK_EQ(range->size(), std::size_t{2}); // not empty, although the cap leaves room
  for (void* const tag : *range) {
    rig.allocator->free(std::exchange(blocks[number_of(tag) - 1], nullptr));
  }
  Block* const block = rig.allocator->try_allocate(16 * MiB, kDevice, kStream);
  CHECK(block != nullptr);
  rig.allocator->free(block);
  for (Block* const left : blocks) {
    rig.allocator->free(left);
  }
}

HARNESS_MAIN()
