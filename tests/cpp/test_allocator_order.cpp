// Bytes written by delayed device work must not appear in a reused block. The emulated runtime delays queued copies at
// random, so a missing wait produces a wrong byte.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "allocator_rig.h"
#include "runtime/emulated/emulated_runtime.h"

using namespace contract;

namespace {

constexpr std::size_t kBytes = 256 * KiB;
constexpr std::uint64_t kSeeds = 40;

class Delayed : public Rig {
 public:
  explicit Delayed(std::uint64_t seed) : Rig(runtime_of(seed), true), a(stream()), b(stream()) {
    for (int i = 0; i < 2; ++i) {
      pinned_.push_back(static_cast<char*>(runtime->allocate_pinned(kBytes)));
      std::memset(pinned_.back(), 'a' + i, kBytes);
    }
  }
  ~Delayed() {
    for (char* const ptr : pinned_) {
      runtime->free_pinned(ptr);
    }
  }
  /// Queues a copy of the letter into the block.
  void fill(Block* block, char letter, Stream stream) {
    runtime->copy_async(allocator->data(block), pinned_[static_cast<std::size_t>(letter - 'a')], kBytes, stream);
  }
  bool holds_only(Block* block, char letter) const {
    const auto* const bytes = static_cast<const char*>(allocator->data(block));
    return std::all_of(bytes, bytes + kBytes, [letter](char byte) { return byte == letter; });
  }
  /// Completes all queued work.
  void finish() {
    runtime->synchronize_device(0);
  }

  Stream a, b;

 private:
  static std::unique_ptr<ManagedRuntime> runtime_of(std::uint64_t seed) {
    EmulatedConfig config;
    config.schedule_seed = seed;
    return std::make_unique<EmulatedRuntime>(config);
  }
  std::vector<char*> pinned_;
};

} // namespace

TEST(a_stream_writes_after_the_previous_stream) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Delayed rig(seed);
    Block* const first = rig.allocate(kBytes, rig.a);
    const std::uintptr_t at = rig.address(first);
    rig.fill(first, 'a', rig.a);
    rig.allocator->free(first);
    Block* const second = rig.allocate(kBytes, rig.b);
    CHECK_EQ(rig.address(second), at);
    rig.fill(second, 'b', rig.b);
    rig.runtime->synchronize_stream(rig.b);
    CHECK(rig.holds_only(second, 'b'));
    rig.finish();
    CHECK(rig.holds_only(second, 'b'));
    rig.allocator->free(second);
  }
}

TEST(the_host_writes_after_the_previous_stream) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Delayed rig(seed);
    Block* const first = rig.allocator->allocate(kBytes, Location::host(), rig.a);
    const std::uintptr_t at = rig.address(first);
    rig.fill(first, 'a', rig.a);
    rig.allocator->free(first);
    Block* const second = rig.allocator->allocate(kBytes, Location::host(), Stream::host());
    CHECK_EQ(rig.address(second), at);
    std::memset(rig.allocator->data(second), 'h', kBytes);
    rig.finish();
    CHECK(rig.holds_only(second, 'h'));
    rig.allocator->free(second);
  }
}

TEST(a_recorded_stream_writes_before_the_block_is_reused) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Delayed rig(seed);
    Block* const first = rig.allocate(kBytes, rig.a);
    rig.allocator->record_stream(first, rig.b);
    rig.fill(first, 'a', rig.b);
    rig.allocator->free(first);
    Block* const second = rig.allocate(kBytes, rig.a);
    rig.fill(second, 'b', rig.a);
    rig.finish();
    CHECK(rig.holds_only(second, 'b'));
    rig.allocator->free(second);
    rig.check();
  }
}

TEST(a_moved_block_is_reused_after_the_work_of_its_old_stream) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Delayed rig(seed);
    Block* const first = rig.allocate(kBytes, rig.a);
    rig.fill(first, 'a', rig.a);
    rig.allocator->set_home(first, Location::host(), Stream::host());
    rig.allocator->free(first);
    for (int i = 0; i < 3; ++i) {
      Block* const next = rig.allocator->allocate(kBytes, Location::host(), Stream::host());
      std::memset(rig.allocator->data(next), 'h', kBytes);
      rig.runtime->query_stream(rig.a); // lets the schedule progress
      CHECK(rig.holds_only(next, 'h'));
      rig.allocator->free(next);
    }
    rig.finish();
    rig.check();
  }
}

TEST(a_block_of_two_streams_that_moved_to_the_host_and_was_freed_by_another_thread_is_waited_for) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Delayed rig(seed);
    Block* const first = rig.allocate(kBytes, rig.a);
    const std::uintptr_t at = rig.address(first);
    rig.fill(first, 'a', rig.a);
    rig.allocator->record_stream(first, rig.b);
    rig.fill(first, 'b', rig.b);
    rig.allocator->set_home(first, Location::host(), Stream::host());
    std::thread([&] { rig.allocator->free(first); }).join();
    CHECK_EQ(rig.allocator->statistics().allocated_bytes[0].current, 0);
    // Allocates host blocks until the one to which both streams wrote is reused.
    std::vector<Block*> blocks;
    do {
      blocks.push_back(rig.allocator->allocate(kBytes, Location::host(), Stream::host()));
      std::memset(rig.allocator->data(blocks.back()), 'h', kBytes);
      rig.check();
    } while (rig.address(blocks.back()) != at && blocks.size() < 64);
    rig.finish();
    for (Block* const block : blocks) {
      CHECK(rig.holds_only(block, 'h'));
      rig.allocator->free(block);
    }
    rig.check();
  }
}

TEST(merged_blocks_are_ordered_after_every_stream) {
  for (std::uint64_t seed = 0; seed < kSeeds; ++seed) {
    Delayed rig(seed);
    rig.runtime->set_limit(64 * MiB);
    rig.allocator->free(rig.allocate(64 * MiB, rig.a));
    Block* const one = rig.allocate(20 * MiB, rig.a);
    Block* const two = rig.allocate(20 * MiB, rig.b);
    Block* const wall = rig.allocate(24 * MiB, rig.a);
    rig.fill(one, 'a', rig.a);
    rig.fill(two, 'b', rig.b);
    rig.allocator->free(one);
    rig.allocator->free(two);
    Block* const both = rig.allocator->allocate(40 * MiB, Location::host(), Stream::host());
    auto* const bytes = static_cast<char*>(rig.allocator->data(both));
    std::memset(bytes, 'h', 40 * MiB);
    rig.finish();
    CHECK(std::all_of(bytes, bytes + 40 * MiB, [](char byte) { return byte == 'h'; }));
    rig.allocator->free(both);
    rig.allocator->free(wall);
    rig.check();
  }
}

HARNESS_MAIN()
