// Sizes that differ between requests: the memory reserved for them is bounded and stops growing.
#include <algorithm>
#include <random>
#include <vector>

#include "allocator_rig.h"
#include "recording/recording_runtime.h"

using namespace contract;

namespace {

/// Sizes of a convolutional network with a variable number of channels, in floats: k*16*7*7, k*7*7, k*7, k and k*32.
std::vector<std::size_t> ragged_sizes() {
  std::vector<std::size_t> sizes;
  for (std::size_t k = 1024; k <= 8192; k += 1024) {
    for (const std::size_t floats : {k * 16 * 7 * 7, k * 7 * 7, k * 7, k, k * 32}) {
      sizes.push_back(floats * sizeof(float));
    }
  }
  return sizes;
}

struct Outcome {
  double waste = 0; ///< (reserved - live) / live, the mean over the second half
  std::int64_t calls = 0; ///< runtime calls for segments, in the second half
};

/// Frees random blocks until the next size fits into `live` bytes, then allocates it; `steps` times, twice.
Outcome churn(Rig& rig, std::size_t live, int steps) {
  std::mt19937_64 random(6);
  const std::vector<std::size_t> sizes = ragged_sizes();
  std::vector<Block*> blocks;
  std::size_t bytes = 0;
  const auto free_one = [&](std::size_t at) {
    bytes -= rig.allocator->requested_bytes(blocks[at]);
    rig.allocator->free(blocks[at]);
    blocks[at] = blocks.back();
    blocks.pop_back();
  };
  const auto calls = [&] {
    const Statistics now = rig.allocator->statistics();
    return now.num_device_alloc + now.num_device_free;
  };
  Outcome outcome;
  for (int step = 0; step < 2 * steps; ++step) {
    if (step == steps) {
      rig.check();
      outcome.calls = calls();
    }
    const std::size_t next = sizes[random() % sizes.size()];
    while (bytes + next > live) {
      free_one(random() % blocks.size());
    }
    blocks.push_back(rig.allocate(next));
    bytes += next;
    if (step >= steps) {
      outcome.waste += (static_cast<double>(rig.reserved()) / static_cast<double>(bytes) - 1) / steps;
    }
  }
  outcome.calls = calls() - outcome.calls;
  rig.check();
  while (!blocks.empty()) {
    free_one(blocks.size() - 1);
  }
  rig.check();
  return outcome;
}

Outcome churn(Rig&& rig, std::size_t live, int steps) {
  return churn(rig, live, steps);
}

Rig recorded(AllocatorOptions options = {}) {
  return Rig(std::make_unique<RecordingRuntime>(1), true, options);
}

} // namespace

TEST(ragged_sizes_waste_little_and_stop_calling_the_runtime) {
  // With a hard bound on live bytes and random lifetimes, best fit in one contiguous memory without an end wastes 18 %.
  const Outcome large = churn(recorded(), 4096 * MiB, 20'000);
  CHECK(large.waste < 0.20);
  CHECK(large.calls <= 2); // in 20 000 steps
  const Outcome small = churn(recorded(), 1024 * MiB, 20'000);
  CHECK(small.waste < 0.50);
  CHECK(small.calls <= 2);
}

TEST(shared_segments_waste_less_than_separate_ones) {
  for (const std::size_t live : {256 * MiB, 1024 * MiB}) {
    const Outcome shared = churn(recorded(), live, 10'000);
    const Outcome own = churn(recorded(apart()), live, 10'000);
    CHECK(shared.waste < 0.85 * own.waste);
  }
}

TEST(a_hard_cap_bounds_the_reservation_for_ragged_sizes) {
  Rig rig = recorded();
  rig.allocator->set_cap(0, 1024 * MiB);
  const Outcome outcome = churn(rig, 512 * MiB, 10'000);
  CHECK(outcome.waste < 1.1);
  CHECK_EQ(rig.allocator->statistics().num_over_cap, std::int64_t{0});
}

TEST(segments_grow_with_the_reserved_bytes) {
  Rig rig = recorded();
  std::vector<Block*> blocks;
  std::vector<std::size_t> made;
  std::int64_t before = 0;
  while (rig.reserved() < std::int64_t{3} << 30) {
    blocks.push_back(rig.allocate(12 * MiB));
    if (rig.reserved() != before) {
      made.push_back(static_cast<std::size_t>(rig.reserved() - before));
      before = rig.reserved();
    }
  }
  CHECK_EQ(made.front(), kSegmentMin / (12 * MiB) * (12 * MiB)); // no remainder
  CHECK_EQ(made.back(), kSegmentMax / (12 * MiB) * (12 * MiB));
  CHECK(std::ranges::is_sorted(made));
  Block* const larger = rig.allocate(kSegmentMax + 6 * MiB);
  CHECK_EQ(rig.reserved() - before, static_cast<std::int64_t>(kSegmentMax + 6 * MiB)); // a segment of its own
  rig.allocator->free(larger);
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  rig.check();
}

TEST(one_size_fills_the_limit) {
  for (const std::size_t bytes : {12 * MiB, 24 * MiB, 30 * MiB, 48 * MiB}) {
    Rig rig = recorded();
    rig.runtime->set_limit(10 * bytes);
    std::vector<Block*> blocks;
    for (int i = 0; i < 10; ++i) {
      blocks.push_back(rig.allocate(bytes));
    }
    CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(10 * bytes));
    for (Block* const block : blocks) {
      rig.allocator->free(block);
    }
  }
}

TEST(large_blocks_start_and_end_on_large_pages) {
  AllocatorOptions options;
  options.segment_min_bytes = 128 * MiB;
  Rig rig = recorded(options);
  std::mt19937_64 random(1);
  std::vector<Block*> blocks;
  for (int step = 0; step < 4000; ++step) {
    if (blocks.size() > 30) {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      rig.allocator->free(blocks.back());
      blocks.pop_back();
    }
    const std::size_t bytes = random() % 2 == 0 ? 1 + random() % (10 * MiB) : 32 * MiB + random() % (16 * MiB);
    Block* const block = blocks.emplace_back(rig.allocate(bytes));
    if (bytes >= kWholePagesRequest) {
      CHECK_EQ(rig.address(block) % kLargeGranularity, std::size_t{0});
      CHECK_EQ(rig.allocator->bytes(block) % kLargeGranularity, std::size_t{0});
    }
  }
  rig.check();
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  rig.check();
}

TEST(a_shared_segment_that_is_refused_is_made_smaller) {
  Rig rig = recorded();
  rig.runtime->set_limit(14 * MiB);
  Block* const block = rig.allocate(13 * MiB);
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(14 * MiB));
  CHECK_EQ(rig.allocator->statistics().num_alloc_retries, std::int64_t{0});
  rig.allocator->free(block);
}

TEST(without_free_device_memory_a_segment_is_no_larger_than_its_request) {
  struct Full final : RecordingRuntime {
    Full() : RecordingRuntime(1) {}
    MemoryInfo memory_info(int) const override {
      return {8 * MiB, 1024 * MiB};
    }
  };
  Rig rig(std::make_unique<Full>(), true, AllocatorOptions{});
  Block* const block = rig.allocate(13 * MiB);
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(14 * MiB));
  rig.allocator->free(block);
}

TEST(unused_segments_stay_cached) {
  Rig rig = recorded(apart());
  std::vector<Block*> blocks;
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(rig.allocate(16 * MiB));
  }
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(128 * MiB));
  CHECK_EQ(static_cast<RecordingRuntime&>(*rig.runtime).count("free_managed"), std::size_t{0});
}

TEST(options_out_of_range_are_refused) {
  Rig rig = recorded(apart());
  AllocatorOptions options;
  options.segment_min_bytes = MiB;
  CHECK_THROWS(InvalidArgument, rig.allocator->set_options(options));
  CHECK(!rig.allocator->options().segment_min_bytes);
}

HARNESS_MAIN()
