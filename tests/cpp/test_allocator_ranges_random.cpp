// Min-cost and first-fit eviction ranges on random heaps, compared with an exhaustive search.
#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "allocator/size_classes.h"
#include "room_helpers.h"

using namespace contract;

namespace {

/// Bytes of the block that serves a request, as in CachingManagedAllocator::State::bytes_for.
std::size_t bytes_of(std::size_t asked, std::optional<std::size_t> cap) {
  const std::size_t whole = block_bytes(asked, cap ? kLargeRequest : kWholePagesRequest);
  const bool wastes = cap && whole - asked > std::min(*cap / 128, asked / 64);
  return wastes ? block_bytes(asked, kLargestRequest) : whole;
}

/// The least cost of evicting neighbours within one segment, found by trying every range of them.
struct Reference {
  std::optional<std::pair<double, std::size_t>> window; ///< cost and allocated bytes
  std::size_t unused = 0; ///< bytes of unused segments
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

/// A random heap. Costs are sums of powers of two, so they are exact.
class RandomHeap {
 public:
  RandomHeap(Rig& rig, std::uint64_t seed) : random(seed), rig_(rig), other_(rig.stream()) {
    if (random() % 6 != 0) {
      rig.allocator->set_cap(0, 128 * MiB + kForSmall);
    }
    const std::size_t count = 10 + random() % 120;
    for (std::size_t i = 0; i < count; ++i) {
      if (Block* const block = rig.allocator->try_allocate(size(), kDevice, random() % 3 == 0 ? other_ : kStream)) {
        blocks_.push_back(block);
      }
    }
    std::ranges::shuffle(blocks_, random);
    for (std::size_t freed = random() % (blocks_.size() / 4 + 1); freed > 0; --freed) {
      if (random() % 4 == 0) { // pending for the rest of the test
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
  /// Every `step`th block whose cost is finite, the last one first.
  std::vector<const Block*> movable(std::size_t step) const {
    std::vector<const Block*> found;
    for (std::size_t i = blocks_.size(); i-- > 0;) {
      if (costs_[i] < kNever && i % step == 0) {
        found.push_back(blocks_[i]);
      }
    }
    return found;
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
  std::vector<double> costs_; ///< indexed by tag
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
    const auto range = rig.allocator->min_cost_range(asked, 0, [&](void* tag, std::size_t of) {
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
    for (void* const tag : range.value_or(std::vector<void*>{})) {
      sum += heap.cost(tag);
      allocated += heap.bytes(tag);
      CHECK(heap.address(tag) > last); // in address order
      last = heap.address(tag);
    }
    CHECK(sum < kNever);
    if (best.unused >= wanting || (best.window && best.window->second == 0 && best.window->first == 0)) {
      CHECK(range.has_value() && range->empty());
      ++free_already;
    } else if (best.window) {
      CHECK(range.has_value());
      CHECK_EQ(sum, best.window->first);
      CHECK_EQ(allocated, best.window->second);
      ++windows;
    } else {
      range ? ++covers : ++none;
    }
    if (range) { // evicting the range is enough
      for (void* const tag : *range) {
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
  // Every kind of result occurred often enough.
  CHECK(windows > 60 && free_already > 60 && covers > 3 && none > 3);
}

TEST(the_min_cost_range_near_blocks_costs_least_among_theirs) {
  std::size_t best_of_all = 0, others = 0, none = 0;
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    RandomHeap heap(rig, seed);
    const std::size_t asked = heap.size();
    const Reference best = reference(rig, bytes_of(asked, rig.allocator->cap(0)), heap.by_address);
    const auto cost = [&](void* tag, std::size_t) { return heap.cost(tag); };
    const auto sum = [&](const std::vector<void*>& tags) {
      return std::accumulate(tags.begin(), tags.end(), 0.0, [&](double of, void* tag) { return of + heap.cost(tag); });
    };
    if (best.window && best.window->second > 0) {
      const auto range = rig.allocator->min_cost_range_near(heap.movable(1), asked, 0, cost);
      CHECK(range.has_value());
      CHECK_EQ(sum(*range), best.window->first);
      ++best_of_all;
    }
    if (const auto range = rig.allocator->min_cost_range_near(heap.movable(7), asked, 0, cost)) {
      CHECK(best.window.has_value() && sum(*range) >= best.window->first);
      for (void* const tag : *range) { // evicting it is enough
        heap.free(tag);
      }
      CHECK(rig.allocator->min_cost_range(asked, 0, cost)->empty());
      ++others;
    } else {
      ++none;
    }
    heap.free_all();
    rig.check();
  }
  CHECK(best_of_all > 60 && others > 60 && none > 3);
}

TEST(the_first_fit_range_is_the_first_on_random_heaps) {
  std::size_t windows = 0, none = 0;
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Rig rig(std::make_unique<RecordingRuntime>(1), false);
    RandomHeap heap(rig, seed);
    const std::size_t asked = heap.random() % 8 == 0 ? 60 * MiB : heap.size();
    const std::size_t bytes = bytes_of(asked, rig.allocator->cap(0));
    const auto range = rig.allocator->first_fit_range(asked, 0, [&](void* tag, std::size_t of) {
      CHECK_EQ(of, heap.bytes(tag));
      return heap.cost(tag);
    });
    // The first neighbours by address that are large enough and may all be evicted.
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
    CHECK_EQ(range.has_value(), wanted.has_value());
    if (range) {
      CHECK_EQ(range->size(), wanted->size());
      for (std::size_t i = 0; i < range->size(); ++i) {
        CHECK_EQ(heap.address((*range)[i]), (*wanted)[i]);
      }
      windows += range->empty() ? 0 : 1;
    } else {
      ++none;
    }
    heap.free_all();
    rig.check();
  }
  CHECK(windows > 60 && none > 3); // every kind of result occurred
}

HARNESS_MAIN()
