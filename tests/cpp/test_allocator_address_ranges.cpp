// Blocks that are address ranges: their memory comes and goes under a cap, and their address stays.
#include <algorithm>
#include <cstring>
#include <random>
#include <string_view>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/testing/emulated_failures.h"

using namespace torch_uvm;

namespace {

constexpr std::size_t kMin = 4 * MiB; // the smallest address range
constexpr std::size_t kCap = 32 * MiB;
constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

EmulatedConfig config(std::size_t memory) {
  EmulatedConfig made;
  made.memory = memory;
  return made;
}

AllocatorOptions options() {
  AllocatorOptions made;
  made.uses_ranges = true;
  made.range_min_bytes = kMin;
  return made;
}

struct Rig {
  EmulatedRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime), options()};

  explicit Rig(std::size_t device_bytes = 64 * MiB) : runtime(config(device_bytes)) {
    memory.set_cap(0, kCap);
  }
  Block* make(std::size_t bytes, unsigned char content = 1) {
    Block* const block = memory.allocate(bytes, kDevice, kStream);
    std::memset(memory.data(block), content, bytes);
    return block;
  }
  bool is_range(const Block* block) const {
    return CachingManagedAllocator::is_range(block);
  }
  std::int64_t reserved() const {
    return memory.levels(kDevice).reserved_bytes[0];
  }
  void is_well() const {
    const auto wrong = memory.check();
    if (wrong) {
      harness::fail(__FILE__, __LINE__, *wrong);
    }
  }
};

} // namespace

TEST(large_blocks_under_a_cap_are_ranges) {
  Rig rig;
  Block* const range = rig.make(kMin + 1);
  Block* const small = rig.make(kMin - 1);
  Block* const managed = rig.memory.allocate(kMin + 1, kDevice, kStream, CachingManagedAllocator::Memory::kManaged);
  CHECK(rig.is_range(range) && !rig.is_range(small) && !rig.is_range(managed) && !rig.is_range(nullptr));
  CHECK(!rig.runtime.is_managed_ptr(rig.memory.data(range)));
  CHECK(rig.runtime.is_managed_ptr(rig.memory.data(managed)));
  CHECK_EQ(rig.memory.bytes(range), 6 * MiB);
  rig.memory.set_cap(0, std::nullopt);
  Block* const without = rig.make(kMin + 1);
  CHECK(!rig.is_range(without));
  CHECK_THROWS(InvalidArgument, rig.memory.set_home(range, Location::host(), Stream::host()));
  CHECK_THROWS(InvalidArgument, rig.memory.detach(small));
  CHECK_THROWS(InvalidArgument, rig.memory.attach(small, kStream));
  rig.is_well();
  for (Block* const block : {range, small, managed, without}) {
    rig.memory.free(block);
  }
}

TEST(a_detached_range_takes_no_memory_and_keeps_its_address) {
  Rig rig;
  Block* const block = rig.make(16 * MiB);
  void* const address = rig.memory.data(block);
  const std::size_t free = rig.runtime.memory_info(0).free;
  for (unsigned char round = 0; round < 3; ++round) {
    rig.memory.detach(block);
    rig.is_well();
    CHECK_EQ(rig.reserved(), 0);
    CHECK_EQ(rig.memory.levels(kDevice).allocated_bytes[0], 0);
    CHECK_EQ(rig.runtime.memory_info(0).free, free + 16 * MiB);
    CHECK(rig.memory.find(address) == nullptr);
    CHECK_THROWS(InvalidArgument, rig.memory.detach(block));
    Block* const other = rig.make(kCap); // all of the cap
    CHECK(!rig.memory.attach(block, kStream));
    rig.memory.free(other);
    CHECK(rig.memory.attach(block, kStream));
    CHECK(rig.memory.attach(block, kStream)); // it has memory already
    CHECK(rig.memory.data(block) == address && rig.memory.find(address) == block);
    std::memset(address, round, 16 * MiB);
    rig.is_well();
  }
  rig.memory.free(block);
}

TEST(a_freed_range_is_cached_for_its_size_only) {
  Rig rig;
  Block* const first = rig.make(8 * MiB);
  void* const address = rig.memory.data(first);
  rig.memory.free(first);
  rig.is_well();
  Block* const smaller = rig.make(6 * MiB);
  Block* const ordinary = rig.make(MiB + 1);
  CHECK(rig.memory.data(smaller) != address && rig.memory.data(ordinary) != address);
  const std::uint64_t maps = rig.runtime.counters().map_calls;
  Block* const again = rig.make(8 * MiB - 1);
  CHECK(rig.memory.data(again) == address);
  CHECK_EQ(rig.runtime.counters().map_calls, maps);
  const Stream other = rig.runtime.create_stream(0, 0);
  rig.memory.free(again);
  Block* const elsewhere = rig.memory.allocate(8 * MiB, kDevice, other); // ordered after the first stream
  CHECK(rig.memory.data(elsewhere) == address);
  for (Block* const block : {smaller, ordinary, elsewhere}) {
    rig.memory.free(block);
  }
  CHECK(rig.memory.empty_cache() > 0);
  CHECK_EQ(rig.reserved(), 0);
  rig.is_well();
}

TEST(cached_segments_make_room_for_memory) {
  Rig rig;
  Block* const block = rig.make(16 * MiB);
  rig.memory.detach(block);
  rig.memory.free(rig.make(24 * MiB)); // a range of another size
  CHECK(rig.memory.attach(block, kStream));
  rig.memory.free(rig.make(2 * MiB)); // an ordinary segment
  rig.memory.detach(block);
  rig.memory.free(rig.make(14 * MiB));
  CHECK(rig.memory.attach(block, kStream));
  rig.is_well();
  rig.memory.free(block);
}

TEST(a_full_device_refuses_memory) {
  Rig rig(40 * MiB);
  Block* const block = rig.make(16 * MiB);
  rig.memory.detach(block);
  void* const other = rig.runtime.allocate_device(30 * MiB, 0);
  CHECK(!rig.memory.attach(block, kStream));
  CHECK(!rig.memory.attach(block, kStream, CachingManagedAllocator::Room::kWait));
  rig.is_well();
  CHECK_THROWS(OutOfMemory, rig.memory.allocate(16 * MiB, kDevice, kStream));
  rig.is_well();
  rig.runtime.free_device(other);
  CHECK(rig.memory.attach(block, kStream));
  rig.memory.free(block);
}

TEST(a_detached_range_can_be_freed) {
  Rig rig;
  rig.memory.free(rig.make(MiB)); // makes what stays: events, segments
  rig.memory.empty_cache();
  const std::size_t before = rig.runtime.live_objects();
  Block* const block = rig.make(16 * MiB);
  rig.memory.detach(block);
  rig.memory.free(block);
  rig.is_well();
  CHECK_EQ(rig.runtime.live_objects(), before);
}

TEST(each_failing_call_changes_nothing) {
  Rig rig;
  Block* const block = rig.make(16 * MiB, 7);
  EmulatedFailures failures(rig.runtime);
  const std::size_t objects = rig.runtime.live_objects();
  for (const std::string_view call : {"reserve_range", "allocate_piece", "map"}) {
    failures.fail(call, 1);
    bool failed = false;
    try {
      rig.memory.free(rig.memory.allocate(8 * MiB, kDevice, kStream));
    } catch (const std::exception&) {
      failed = true;
    }
    rig.is_well();
    CHECK(failed != (call == "allocate_piece")); // memory that is refused is asked for again
    rig.memory.empty_cache();
    CHECK_EQ(rig.runtime.live_objects(), objects);
  }
  failures.fail("unmap", 1);
  CHECK_THROWS(RuntimeFailure, rig.memory.detach(block));
  rig.is_well();
  CHECK_EQ(int{*static_cast<unsigned char*>(rig.memory.data(block))}, 7);
  rig.memory.detach(block);
  failures.fail("map", 1);
  CHECK_THROWS(RuntimeFailure, rig.memory.attach(block, kStream));
  rig.is_well();
  failures.fail("allocate_piece", 1);
  CHECK(rig.memory.attach(block, kStream)); // the second try
  rig.is_well();
  rig.memory.free(block);
}

TEST(room_for_a_range_is_the_cheapest_ranges_anywhere) {
  Rig rig;
  std::vector<Block*> blocks;
  for (int at = 0; at < 4; ++at) {
    blocks.push_back(rig.make(8 * MiB));
    rig.memory.set_tag(blocks.back(), blocks.back());
  }
  const std::vector<double> costs{1, 9, 1, 9};
  const auto cost = [&](void* tag, std::size_t) {
    return costs[static_cast<std::size_t>(std::ranges::find(blocks, tag) - blocks.begin())];
  };
  const auto two = rig.memory.min_cost_range(16 * MiB, 0, cost);
  CHECK(two && two->size() == 2);
  CHECK(std::ranges::find(*two, blocks[0]) != two->end() && std::ranges::find(*two, blocks[2]) != two->end());
  const auto one = rig.memory.min_cost_range(MiB, 0, cost); // room for a segment of small requests
  CHECK(one && one->size() == 1);
  CHECK(!rig.memory.first_fit_range(MiB, 0, cost));
  CHECK(!rig.memory.find_slides(MiB, 0, cost));
  CHECK(rig.memory.reserve_moves(MiB, 0, kStream, cost, [](void*) { return true; }).empty());
  for (void* const tag : *two) {
    rig.memory.detach(static_cast<Block*>(tag));
  }
  Block* const large = rig.make(16 * MiB);
  rig.is_well();
  rig.memory.free(large);
  for (Block* const block : blocks) {
    rig.memory.free(block);
  }
}

TEST(random_operations_keep_every_byte) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    Rig rig;
    std::mt19937 random(seed);
    struct Owned {
      Block* block;
      unsigned char content;
      std::vector<unsigned char> host; ///< not empty: detached
    };
    std::vector<Owned> owned;
    const auto pick = [&](std::size_t below) { return static_cast<std::size_t>(random()) % below; };
    for (int step = 0; step < 400; ++step) {
      if (owned.empty() || pick(3) == 0) {
        const std::size_t bytes = (1 + pick(10)) * MiB + pick(2);
        if (Block* const block = rig.memory.try_allocate(bytes, kDevice, kStream)) {
          const auto content = static_cast<unsigned char>(1 + pick(250));
          std::memset(rig.memory.data(block), content, bytes);
          owned.push_back({block, content, {}});
        }
        continue;
      }
      const std::size_t at = pick(owned.size());
      Owned& each = owned[at];
      auto* const ptr = static_cast<unsigned char*>(rig.memory.data(each.block));
      const std::size_t bytes = rig.memory.requested_bytes(each.block);
      if (each.host.empty()) {
        CHECK(std::all_of(ptr, ptr + bytes, [&](unsigned char byte) { return byte == each.content; }));
      }
      if (pick(3) == 0) {
        rig.memory.free(each.block);
        owned.erase(owned.begin() + static_cast<std::ptrdiff_t>(at));
      } else if (rig.is_range(each.block) && each.host.empty()) {
        each.host.assign(ptr, ptr + bytes);
        rig.memory.detach(each.block);
      } else if (rig.is_range(each.block) && rig.memory.attach(each.block, kStream)) {
        std::memcpy(ptr, each.host.data(), bytes);
        each.host.clear();
      }
      rig.is_well();
      CHECK(rig.reserved() <= static_cast<std::int64_t>(kCap));
    }
    for (const Owned& each : owned) {
      rig.memory.free(each.block);
    }
  }
}

HARNESS_MAIN()
