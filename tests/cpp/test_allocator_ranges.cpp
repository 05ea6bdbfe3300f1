// Evicting the min-cost range of neighbours: the request then fits, and on average little more is freed than needed.
#include <algorithm>
#include <array>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "allocator/size_classes.h"
#include "room_helpers.h"

using namespace contract;

TEST(evicting_the_min_cost_range_makes_the_request_fit) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB + kForSmall);
    std::vector<Block*> blocks;
    for (std::size_t i = 0; i < 8; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
      CHECK(rig.allocator->tag(blocks[i]) == nullptr);
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
    }
    CHECK(rig.allocator->try_allocate(16 * MiB, kDevice, kStream) == nullptr);
    const auto range = rig.allocator->min_cost_range(16 * MiB, 0, [&](void* tag, std::size_t bytes) {
      CHECK_EQ(bytes, 8 * MiB);
      const std::size_t i = number_of(tag);
      return i == 4 ? kNever : i <= 4 ? 3.0 : i == 6 ? 1.0 : 2.0;
    });
    CHECK(range.has_value());
    CHECK_EQ(range->size(), std::size_t{2});
    for (void* const tag : *range) {
      rig.allocator->free(std::exchange(blocks[number_of(tag) - 1], nullptr));
    }
    Block* const block = rig.allocator->try_allocate(16 * MiB, kDevice, kStream);
    CHECK(block != nullptr);
    CHECK(rig.allocator->tag(block) == nullptr);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(64 * MiB));
    rig.allocator->free(block);
    CHECK(rig.allocator->min_cost_range(16 * MiB, 0, by_bytes)->empty()); // already free
    CHECK(!rig.allocator->min_cost_range(80 * MiB, 0, free_of_cost)); // larger than the cap
    for (Block* const left : blocks) {
      rig.allocator->free(left);
    }
  });
}

TEST(a_cost_that_throws_changes_nothing) {
  on_each([](Rig& rig) {
    Block* const block = rig.allocate(12 * MiB);
    const auto fails = [](void*, std::size_t) -> double { throw RuntimeFailure("no idea"); };
    CHECK_THROWS(RuntimeFailure, rig.allocator->min_cost_range(12 * MiB, 0, fails));
    CHECK_THROWS(InvalidArgument, rig.allocator->min_cost_range(0, 0, free_of_cost));
    CHECK_THROWS(InvalidArgument, rig.allocator->min_cost_range(1, 2, free_of_cost));
    rig.check();
    rig.allocator->free(block);
  });
}

TEST(small_blocks_are_placed_together_if_a_cap_leaves_them_no_segment) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB + kForSmall);
    std::vector<Block*> blocks;
    for (int i = 0; i < 8; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
    }
    std::ranges::sort(blocks, {}, [&](Block* block) { return rig.address(block); });
    const std::uintptr_t lowest = rig.address(blocks[1]), snug = rig.address(blocks[6]) + 7 * MiB;
    rig.allocator->free(std::exchange(blocks[6], nullptr));
    blocks[6] = rig.allocate(7 * MiB);
    CHECK_EQ(rig.address(blocks[6]), snug - 7 * MiB); // behind it is 1 MiB, which would be the best fit
    rig.allocator->free(std::exchange(blocks[1], nullptr));
    std::vector<Block*> small;
    for (int i = 0; i < 2; ++i) {
      small.push_back(rig.allocate(kSmallRequest)); // the segment for small requests is full
    }
    for (int i = 0; i < 16; ++i) {
      small.push_back(rig.allocate(64 * KiB));
      CHECK(rig.address(small.back()) >= lowest && rig.address(small.back()) < lowest + MiB);
    }
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(64 * MiB + kForSmall));
    for (Block* const block : small) {
      rig.allocator->free(block);
    }
    for (Block* const block : blocks) {
      rig.allocator->free(block);
    }
  });
}

TEST(a_small_request_merges_neighbours_of_several_streams_where_none_is_large_enough_alone) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 16 * MiB + kForSmall);
    std::vector<Block*> others = {rig.allocate(9 * MiB), rig.allocate(6 * MiB)};
    for (int i = 0; i < 2; ++i) {
      others.push_back(rig.allocate(kSmallRequest)); // fills the segment for small requests
    }
    Block* const left = rig.allocate(kSmallRequest / 2);
    Block* const right = rig.allocate(kSmallRequest / 2, rig.stream());
    const std::uintptr_t address = rig.address(left);
    CHECK_EQ(rig.address(right), address + kSmallRequest / 2);
    rig.allocator->free(left);
    rig.allocator->free(right);
    others.push_back(rig.allocate(kSmallRequest));
    CHECK_EQ(rig.address(others.back()), address);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(16 * MiB + kForSmall));
    for (Block* const block : others) {
      rig.allocator->free(block);
    }
  });
}

TEST(emptied_segments_cost_at_most_twice_the_minimum) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    std::mt19937_64 random(seed);
    // Segments of one block each, of 10 to 28 MiB; the cap leaves no room.
    const std::size_t count = 4 + random() % 7;
    std::vector<Block*> blocks;
    std::vector<double> costs;
    std::size_t total = 0;
    for (std::size_t i = 0; i < count; ++i) {
      blocks.push_back(rig.allocate((5 + random() % 10) * 2 * MiB));
      rig.allocator->set_tag(blocks.back(), tag_of(i + 1));
      costs.push_back(static_cast<double>(1 + random() % 100));
      total += rig.allocator->bytes(blocks.back());
    }
    rig.allocator->set_cap(0, total + kForSmall);
    const std::size_t bytes = (15 + random() % 10) * 2 * MiB; // larger than any of the segments
    double least = kNever;
    for (std::size_t set = 1; set < std::size_t{1} << count; ++set) {
      double sum = 0;
      std::size_t freed = 0;
      for (std::size_t i = 0; i < count; ++i) {
        if ((set >> i & 1) != 0) {
          sum += costs[i];
          freed += rig.allocator->bytes(blocks[i]);
        }
      }
      if (freed >= bytes) {
        least = std::min(least, sum);
      }
    }
    const auto range =
        rig.allocator->min_cost_range(bytes, 0, [&](void* tag, std::size_t) { return costs[number_of(tag) - 1]; });
    CHECK_EQ(range.has_value(), least < kNever);
    double sum = 0;
    for (void* const tag : range.value_or(std::vector<void*>{})) {
      sum += costs[number_of(tag) - 1];
      rig.allocator->free(std::exchange(blocks[number_of(tag) - 1], nullptr));
    }
    if (range) {
      CHECK(sum <= 2 * least);
      Block* const block = rig.allocator->try_allocate(bytes, kDevice, kStream);
      CHECK(block != nullptr);
      rig.allocator->free(block);
    }
    for (Block* const block : blocks) {
      rig.allocator->free(block);
    }
    rig.check();
  }
}

TEST(evictions_free_little_more_than_the_requests_need) {
  // A transformer's sizes come and go under a cap. When a request does not fit, the min-cost range is evicted; blocks
  // that were used long ago are cheap. Evicted bytes beyond the request stay free for the next requests.
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    rig.allocator->set_cap(0, 512 * MiB);
    struct Live {
      Block* block;
      bool activation;
      std::uint64_t used;
    };
    std::map<std::size_t, Live> live;
    std::mt19937_64 random(seed);
    std::size_t next = 1, failures = 0, wasteful = 0, given = 0, asked = 0;
    for (std::uint64_t now = 1; now <= 6000; ++now) {
      for (auto& [number, one] : live) {
        one.used = random() % 20 == 0 ? now : one.used;
      }
      const auto dies = std::ranges::find_if(live, [&](const auto& one) { return one.second.activation; });
      if (random() % 2 == 0 && dies != live.end()) {
        rig.allocator->free(dies->second.block);
        live.erase(dies);
      }
      constexpr std::array<std::size_t, 10> kWeights{2, 2, 2, 8, 8, 8, 8, 32, 32, 64};
      const bool activation = random() % 2 == 0;
      const std::size_t bytes = activation ? MiB + 1 + random() % (9 * MiB) : kWeights[random() % 10] * MiB;
      Block* block = rig.allocator->try_allocate(bytes, kDevice, kStream);
      if (block == nullptr) {
        const auto range = rig.allocator->min_cost_range(bytes, 0, [&](void* tag, std::size_t of) {
          return static_cast<double>(of) / static_cast<double>(1 + now - live.at(number_of(tag)).used);
        });
        CHECK(range.has_value());
        std::size_t freed = 0;
        for (void* const tag : *range) {
          freed += rig.allocator->bytes(live.at(number_of(tag)).block);
          rig.allocator->free(live.at(number_of(tag)).block);
          live.erase(number_of(tag));
        }
        ++failures;
        wasteful += 10 * freed > 13 * bytes;
        given += freed;
        asked += bytes;
        block = rig.allocator->try_allocate(bytes, kDevice, kStream);
        CHECK(block != nullptr); // fits at the first attempt
      }
      CHECK(reserved_on(rig) <= static_cast<std::int64_t>(512 * MiB));
      rig.allocator->set_tag(block, tag_of(next));
      live[next++] = {block, activation, now};
    }
    CHECK(failures > 1000);
    CHECK(10 * wasteful < failures); // 5 to 8 of 100 in practice
    CHECK(100 * given < 105 * asked);
    rig.check();
    for (const auto& [number, one] : live) {
      rig.allocator->free(one.block);
    }
  }
}

HARNESS_MAIN()
