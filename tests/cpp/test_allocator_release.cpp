// Memory released before there is pressure: the release threshold, and garbage collection by age.
#include <algorithm>
#include <utility>
#include <vector>

#include "allocator_rig.h"
#include "recording/recording_runtime.h"

using namespace contract;

namespace {

struct Keeping : Rig {
  explicit Keeping(AllocatorOptions options)
      : Rig(std::make_unique<RecordingRuntime>(2), true, options),
        calls(static_cast<RecordingRuntime&>(*runtime)),
        a(stream()),
        work(runtime->create_event(0, false)) {}
  Keeping(Keeping&&) = delete;
  ~Keeping() {
    runtime->destroy_event(work);
  }

  /// Queues work that does not begin.
  void keep_busy(Stream on) {
    calls.hold(on);
    runtime->record_event(work, on);
  }
  void free_all(std::vector<Block*>& blocks) const {
    for (Block* const block : std::exchange(blocks, {})) {
      allocator->free(block);
    }
  }
  /// Whether a segment begins there.
  bool has(std::uintptr_t address) const {
    return std::ranges::any_of(allocator->snapshot(), [=](const auto& segment) { return segment.address == address; });
  }

  RecordingRuntime& calls;
  Stream a;
  Event work;
};

AllocatorOptions keeping(std::optional<std::size_t> bytes) {
  AllocatorOptions options = apart();
  options.release_threshold = bytes;
  return options;
}

constexpr std::int64_t mib(std::int64_t count) {
  return count * static_cast<std::int64_t>(MiB);
}

} // namespace

TEST(without_a_threshold_nothing_is_released) {
  Keeping rig(keeping(std::nullopt));
  std::vector<Block*> blocks;
  for (int i = 0; i < 8; ++i) {
    blocks.push_back(rig.allocate(16 * MiB, rig.a));
  }
  rig.free_all(blocks);
  CHECK_EQ(rig.reserved(), mib(128));
  CHECK_EQ(rig.calls.count("free_managed"), std::size_t{0});
}

TEST(free_segments_beyond_the_threshold_are_released_longest_unused_first) {
  Keeping rig(keeping(40 * MiB));
  std::vector<Block*> blocks;
  std::vector<std::uintptr_t> at;
  for (int i = 0; i < 4; ++i) {
    at.push_back(rig.address(blocks.emplace_back(rig.allocate(16 * MiB, rig.a))));
  }
  rig.allocator->free(blocks[2]);
  rig.allocator->free(blocks[0]);
  CHECK_EQ(rig.reserved(), mib(64)); // 32 MiB are free
  rig.check();
  rig.allocator->free(blocks[3]);
  CHECK_EQ(rig.reserved(), mib(48));
  CHECK(!rig.has(at[2]) && rig.has(at[0]) && rig.has(at[3]));
  rig.check();
  rig.allocator->free(blocks[1]);
  CHECK(!rig.has(at[0]) && rig.has(at[3]) && rig.has(at[1]));
  CHECK_EQ(rig.reserved(), mib(32));
  rig.check();
}

TEST(a_partly_used_segment_is_not_released) {
  Keeping rig(keeping(0));
  Block* const one = rig.allocate(3 * MiB, rig.a);
  Block* const two = rig.allocate(3 * MiB, rig.a);
  rig.allocator->free(one);
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kMediumSegment));
  rig.allocator->free(two);
  CHECK_EQ(rig.reserved(), std::int64_t{0});
  rig.check();
}

TEST(nothing_is_released_while_queued_work_may_use_it) {
  Keeping rig(keeping(0));
  Block* const block = rig.allocate(16 * MiB, rig.a);
  rig.keep_busy(rig.a);
  rig.calls.clear_calls();
  rig.allocator->free(block); // releasing it would have to wait
  CHECK_EQ(rig.reserved(), mib(16));
  Block* const again = rig.allocate(16 * MiB, rig.a);
  CHECK_EQ(rig.calls.count("allocate_managed"), std::size_t{0});
  rig.allocator->free(again);
  rig.calls.release(rig.a);
  Block* const larger = rig.allocate(32 * MiB, rig.a); // needs a new segment; the excess is released first
  CHECK_EQ(rig.reserved(), mib(32));
  rig.check();
  rig.allocator->free(larger);
  CHECK_EQ(rig.reserved(), std::int64_t{0});
  rig.check();
}

TEST(the_threshold_applies_to_each_home_separately) {
  Keeping rig(keeping(20 * MiB));
  const auto allocate = [&](Location home) {
    return rig.allocator->allocate(16 * MiB, home, home.is_host() ? Stream::host() : Stream::default_of(home.index));
  };
  std::vector<Block*> blocks;
  for (const Location home : {Location::host(), Location::device(0), Location::device(1)}) {
    blocks.push_back(allocate(home));
  }
  rig.free_all(blocks);
  CHECK_EQ(rig.reserved(), mib(48));
  rig.check();
  blocks = {allocate(Location::device(1)), allocate(Location::device(1))};
  rig.free_all(blocks);
  CHECK_EQ(rig.reserved(), mib(48));
  CHECK_EQ(rig.allocator->levels(Location::device(1)).reserved_bytes[0], mib(16));
  rig.check();
}

TEST(a_lower_threshold_acts_at_once) {
  Keeping rig(keeping(std::nullopt));
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(rig.allocate(16 * MiB, rig.a));
  }
  rig.free_all(blocks);
  rig.allocator->set_options(keeping(36 * MiB));
  CHECK_EQ(rig.reserved(), mib(32));
  rig.allocator->set_options(keeping(0));
  CHECK_EQ(rig.reserved(), std::int64_t{0});
  rig.check();
}

TEST(a_block_of_another_home_prevents_the_release_of_its_segment) {
  Keeping rig(keeping(0));
  Block* const block = rig.allocate(16 * MiB, rig.a);
  rig.allocator->set_home(block, Location::host(), Stream::host());
  rig.keep_busy(rig.a);
  rig.allocator->free(block); // the queued work of `a` has to complete first
  CHECK_EQ(rig.reserved(), mib(16));
  rig.calls.release(rig.a);
  rig.allocator->free(rig.allocate(512, rig.a)); // makes the block available; the next check finds its segment unused
  rig.check();
  CHECK_EQ(rig.reserved(), std::int64_t{0});
}

TEST(values_out_of_range_are_refused) {
  Keeping rig(keeping(std::nullopt));
  AllocatorOptions options;
  options.segment_min_bytes = MiB;
  CHECK_THROWS(InvalidArgument, rig.allocator->set_options(options));
  CHECK(!rig.allocator->options().segment_min_bytes);
}

HARNESS_MAIN()
