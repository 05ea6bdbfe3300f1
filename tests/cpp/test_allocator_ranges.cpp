// The cheapest run of neighbours to give up: against every run there is, and how much it costs over time.
#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "allocator/size_classes.h"
#include "room_helpers.h"

using namespace contract;

TEST(evicting_the_min_cost_range_makes_the_request_fit) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB + kForSmall, true);
    std::vector<Block*> blocks;
    for (std::size_t i = 0; i < 8; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
      CHECK(rig.allocator->tag(blocks[i]) == nullptr);
      rig.allocator->set_tag(blocks[i], tag_of(i + 1));
    }
    CHECK(rig.allocator->try_allocate(16 * MiB, kDevice, kStream) == nullptr);
    const auto run = rig.allocator->min_cost_range(16 * MiB, 0, [&](void* tag, std::size_t bytes) {
      CHECK_EQ(bytes, 8 * MiB);
      const std::size_t i = number_of(tag);
      return i == 4 ? kNever : i <= 4 ? 3.0 : i == 6 ? 1.0 : 2.0;
    });
    CHECK(run.has_value());
    CHECK_EQ(run->size(), std::size_t{2});
    for (void* const tag : *run) {
      rig.allocator->free(std::exchange(blocks[number_of(tag) - 1], nullptr));
    }
    Block* const block = rig.allocator->try_allocate(16 * MiB, kDevice, kStream);
    CHECK(block != nullptr);
    CHECK(rig.allocator->tag(block) == nullptr);
    CHECK_EQ(reserved_on(rig), static_cast<std::int64_t>(64 * MiB));
    rig.allocator->free(block);
    CHECK(rig.allocator->min_cost_range(16 * MiB, 0, by_bytes)->empty()); // free already
    CHECK(!rig.allocator->min_cost_range(80 * MiB, 0, free_of_cost)); // more than the cap
    for (Block* const left : blocks) {
      rig.allocator->free(left);
    }
  });
}

namespace {

/// Of the block that serves a request, as CachingManagedAllocator::State::bytes_for has it.
std::size_t bytes_of(std::size_t asked, std::optional<std::size_t> cap) {
  const std::size_t whole = block_bytes(asked, cap ? kLargeRequest : kWholePagesRequest);
  return cap && whole - asked > *cap / 128 ? block_bytes(asked, kLargestRequest) : whole;
}

/// The least that giving up neighbours of one segment costs, by trying every run of them.
struct Reference {
  std::optional<std::pair<double, std::size_t>> window; ///< cost and allocated bytes
  std::size_t unused = 0; ///< bytes of segments with nothing in use
};

Reference reference(const Rig& rig, std::size_t bytes, const std::map<std::uintptr_t, double>& cost) {
  Reference found;
  for (const SegmentInfo& segment : rig.allocator->snapshot()) {
    if (segment.home != kDevice) {
      continue;
    }
    found.unused += segment.active_bytes == 0 ? segment.bytes : 0;
    for (std::size_t first = 0; first < segment.blocks.size(); ++first) {
      double sum = 0;
      std::size_t held = 0, allocated = 0;
      for (std::size_t last = first; last < segment.blocks.size(); ++last) {
        const BlockInfo& block = segment.blocks[last];
        held += block.bytes;
        if (block.state == BlockInfo::State::kAllocated) {
          sum += cost.at(block.address);
          allocated += block.bytes;
        }
        if (sum == kNever) {
          break;
        }
        if (held >= bytes && (!found.window || std::pair(sum, allocated) < *found.window)) {
          found.window = std::pair(sum, allocated);
        }
      }
    }
  }
  return found;
}

/// A heap at random, with costs that are sums of powers of two: they are exact.
class RandomHeap {
 public:
  RandomHeap(Rig& rig, std::uint64_t seed) : random(seed), rig_(rig), other_(rig.stream()) {
    if (random() % 6 != 0) {
      rig.allocator->set_cap(0, 128 * MiB + kForSmall, true);
    }
    const std::size_t count = 10 + random() % 120;
    for (std::size_t i = 0; i < count; ++i) {
      if (Block* const block = rig.allocator->try_allocate(size(), kDevice, random() % 3 == 0 ? other_ : kStream)) {
        blocks_.push_back(block);
      }
    }
    std::ranges::shuffle(blocks_, random);
    for (std::size_t freed = random() % (blocks_.size() / 4 + 1); freed > 0; --freed) {
      if (random() % 4 == 0) { // pending, for good
        rig.allocator->record_stream(blocks_.back(), held());
      }
      rig.allocator->free(blocks_.back());
      blocks_.pop_back();
    }
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      rig.allocator->set_tag(blocks_[i], tag_of(i + 1));
      const double price = random() % 8 == 0 ? kNever : static_cast<double>(random() % 64) / 8;
      costs_.push_back(price);
      by_address[rig.address(blocks_[i])] = price;
    }
    rig.check();
  }
  std::size_t size() {
    switch (random() % 4) {
      case 0:
        return 1 + random() % MiB;
      case 1:
        return (1 + random() % 8) * 8 * MiB / 4;
      default:
        return 1 + random() % (12 * MiB);
    }
  }
  double cost(void* tag) const {
    return costs_.at(number_of(tag) - 1);
  }
  std::size_t bytes(void* tag) const {
    return rig_.allocator->bytes(blocks_.at(number_of(tag) - 1));
  }
  std::uintptr_t address(void* tag) const {
    return rig_.address(blocks_.at(number_of(tag) - 1));
  }
  void free(void* tag) {
    rig_.allocator->free(std::exchange(blocks_.at(number_of(tag) - 1), nullptr));
  }
  void free_all() {
    for (Block* const block : blocks_) {
      rig_.allocator->free(block);
    }
  }

  std::mt19937_64 random;
  std::map<std::uintptr_t, double> by_address;

 private:
  Stream held() {
    if (!held_) {
      held_ = rig_.stream();
      static_cast<RecordingRuntime&>(*rig_.runtime).hold(*held_);
    }
    return *held_;
  }
  Rig& rig_;
  Stream other_;
  std::optional<Stream> held_;
  std::vector<Block*> blocks_;
  std::vector<double> costs_; ///< by tag
};

} // namespace

TEST(the_min_cost_range_costs_least_on_random_heaps) {
  std::size_t windows = 0, free_already = 0, covers = 0, none = 0;
  for (std::uint64_t seed = 1; seed <= 1200; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    RandomHeap heap(rig, seed);
    const std::size_t asked = heap.random() % 16 == 0 ? 96 * MiB : heap.size();
    const std::size_t bytes = bytes_of(asked, rig.allocator->cap(0));
    const Reference best = reference(rig, bytes, heap.by_address);
    std::map<void*, int> seen;
    const auto run = rig.allocator->min_cost_range(asked, 0, [&](void* tag, std::size_t of) {
      CHECK_EQ(of, heap.bytes(tag));
      CHECK_EQ(++seen[tag], 1);
      return heap.cost(tag);
    });
    const std::size_t cap = rig.allocator->cap(0).value_or(0);
    const std::size_t own = round_up(bytes, kLargeGranularity);
    const auto taken = static_cast<std::size_t>(reserved_on(rig));
    const std::size_t wanting = cap == 0 ? own : taken + own > cap ? taken + own - cap : 0;
    double sum = 0;
    std::size_t allocated = 0;
    std::uintptr_t last = 0;
    for (void* const tag : run.value_or(std::vector<void*>{})) {
      sum += heap.cost(tag);
      allocated += heap.bytes(tag);
      CHECK(heap.address(tag) > last); // lowest first
      last = heap.address(tag);
    }
    CHECK(sum < kNever);
    if (best.unused >= wanting || (best.window && best.window->second == 0 && best.window->first == 0)) {
      CHECK(run.has_value() && run->empty());
      ++free_already;
    } else if (best.window) {
      CHECK(run.has_value());
      CHECK_EQ(sum, best.window->first);
      CHECK_EQ(allocated, best.window->second);
      ++windows;
    } else {
      run ? ++covers : ++none;
    }
    if (run) { // it is as good as its word
      for (void* const tag : *run) {
        heap.free(tag);
      }
      rig.check();
      Block* const block = rig.allocator->allocate(asked, kDevice, kStream);
      rig.check();
      CHECK(cap == 0 || static_cast<std::size_t>(reserved_on(rig)) <= cap);
      rig.allocator->free(block);
    }
    heap.free_all();
    rig.check();
  }
  // Every kind of answer was seen, often enough.
  CHECK(windows > 60 && free_already > 60 && covers > 3 && none > 3);
}

TEST(the_first_fit_range_is_the_first_on_random_heaps) {
  std::size_t windows = 0, none = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    RandomHeap heap(rig, seed);
    const std::size_t asked = heap.random() % 8 == 0 ? 60 * MiB : heap.size();
    const std::size_t bytes = bytes_of(asked, rig.allocator->cap(0));
    const auto run = rig.allocator->first_fit_range(asked, 0, [&](void* tag, std::size_t of) {
      CHECK_EQ(of, heap.bytes(tag));
      return heap.cost(tag);
    });
    // Neighbours none of which stays: the first of them, by address, that are enough.
    std::optional<std::vector<std::uintptr_t>> wanted;
    for (const SegmentInfo& segment : rig.allocator->snapshot()) {
      std::vector<std::uintptr_t> allocated;
      std::size_t found = 0;
      for (const BlockInfo& block : segment.blocks) {
        const bool taken = block.state == BlockInfo::State::kAllocated;
        if (taken && heap.by_address.at(block.address) == kNever) {
          allocated.clear();
          found = 0;
          continue;
        }
        if (taken) {
          allocated.push_back(block.address);
        }
        found += block.bytes;
        if (found >= bytes && segment.home == kDevice) {
          wanted = allocated;
          break;
        }
      }
      if (wanted) {
        break;
      }
    }
    CHECK_EQ(run.has_value(), wanted.has_value());
    if (run) {
      CHECK_EQ(run->size(), wanted->size());
      for (std::size_t i = 0; i < run->size(); ++i) {
        CHECK_EQ(heap.address((*run)[i]), (*wanted)[i]);
      }
      windows += run->empty() ? 0 : 1;
    } else {
      ++none;
    }
    heap.free_all();
    rig.check();
  }
  CHECK(windows > 60 && none > 3); // each kind of answer was seen
}

TEST(small_blocks_lie_together_where_a_cap_leaves_them_no_segment) {
  on_each([](Rig& rig) {
    rig.allocator->set_cap(0, 64 * MiB + kForSmall, true);
    std::vector<Block*> blocks;
    for (int i = 0; i < 8; ++i) {
      blocks.push_back(rig.allocate(8 * MiB));
    }
    std::ranges::sort(blocks, {}, [&](Block* block) { return rig.address(block); });
    const std::uintptr_t lowest = rig.address(blocks[1]), snug = rig.address(blocks[6]) + 7 * MiB;
    rig.allocator->free(std::exchange(blocks[6], nullptr));
    blocks[6] = rig.allocate(7 * MiB);
    CHECK_EQ(rig.address(blocks[6]), snug - 7 * MiB); // after it is 1 MiB, which would be the best fit
    rig.allocator->free(std::exchange(blocks[1], nullptr));
    std::vector<Block*> small;
    for (int i = 0; i < 2; ++i) {
      small.push_back(rig.allocate(kSmallRequest)); // the segment of small requests is full
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

TEST(segments_to_empty_cost_no_more_than_twice_the_least) {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    std::mt19937_64 random(seed);
    // Segments of one block each, of 10 to 28 MiB; the cap leaves nothing.
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
    rig.allocator->set_cap(0, total, true);
    const std::size_t bytes = (15 + random() % 10) * 2 * MiB; // more than any of them
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
    const auto run =
        rig.allocator->min_cost_range(bytes, 0, [&](void* tag, std::size_t) { return costs[number_of(tag) - 1]; });
    CHECK_EQ(run.has_value(), least < kNever);
    double sum = 0;
    for (void* const tag : run.value_or(std::vector<void*>{})) {
      sum += costs[number_of(tag) - 1];
      rig.allocator->free(std::exchange(blocks[number_of(tag) - 1], nullptr));
    }
    if (run) {
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

TEST(little_more_than_what_is_needed_is_given_up) {
  // A transformer's sizes come and go under a cap; each time nothing fits, the cheapest run goes, where what was used
  // long ago is cheap. What is given up beyond the request stays free for the next ones.
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    rig.allocator->set_cap(0, 512 * MiB, true);
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
        const auto run = rig.allocator->min_cost_range(bytes, 0, [&](void* tag, std::size_t of) {
          return static_cast<double>(of) / static_cast<double>(1 + now - live.at(number_of(tag)).used);
        });
        CHECK(run.has_value());
        std::size_t freed = 0;
        for (void* const tag : *run) {
          freed += rig.allocator->bytes(live.at(number_of(tag)).block);
          rig.allocator->free(live.at(number_of(tag)).block);
          live.erase(number_of(tag));
        }
        ++failures;
        wasteful += 10 * freed > 13 * bytes;
        given += freed;
        asked += bytes;
        block = rig.allocator->try_allocate(bytes, kDevice, kStream);
        CHECK(block != nullptr); // at the first go
      }
      CHECK(reserved_on(rig) <= static_cast<std::int64_t>(512 * MiB));
      rig.allocator->set_tag(block, tag_of(next));
      live[next++] = {block, activation, now};
    }
    CHECK(failures > 1000);
    CHECK(10 * wasteful < failures); // 5 to 8 of 100 are
    CHECK(100 * given < 105 * asked);
    rig.check();
    for (const auto& [number, one] : live) {
      rig.allocator->free(one.block);
    }
  }
}

HARNESS_MAIN()
