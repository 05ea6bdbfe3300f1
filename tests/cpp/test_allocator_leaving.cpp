// Address ranges whose memory goes to the next user while queued work still uses it.
#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "harness.h"
#include "range_blocks.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/testing/emulated_failures.h"

using namespace torch_uvm;
using namespace range_blocks;

namespace {

constexpr std::size_t kCap = 16 * MiB;

/// Queued work runs late, in an order that the seed decides and that streams and events allow.
struct Rig {
  EmulatedRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime), options()};
  Stream copies = runtime.create_stream(0, 0);
  Stream other = runtime.create_stream(0, 0);

  explicit Rig(std::uint64_t seed = 1) : runtime(config(seed)) {
    memory.set_cap(0, kCap);
  }
  Block* make(std::size_t bytes = kBytes) {
    return memory.allocate(bytes, kDevice, kStream);
  }
  void fill(Block* block, const std::vector<unsigned char>& from, Stream stream) {
    runtime.copy_async(memory.data(block), from.data(), from.size(), stream);
  }
  /// Queues a copy to the host on `copies`, after the work of kStream, and takes the memory away after it.
  void leave(Block* block, std::vector<unsigned char>& to) {
    const Event written = memory.take_event(kStream);
    runtime.record_event(written, kStream);
    runtime.wait_event(copies, written);
    memory.recycle_event(kStream, written);
    runtime.copy_async(to.data(), memory.data(block), to.size(), copies);
    const Event read = memory.take_event(copies);
    runtime.record_event(read, copies);
    memory.detach_after(block, read, copies);
    is_well();
  }
  std::int64_t reserved() const {
    return memory.levels(kDevice).reserved_bytes[0];
  }
  void is_well() const {
    if (const auto wrong = memory.check()) {
      harness::fail(__FILE__, __LINE__, *wrong);
    }
  }
  /// Frees the blocks, and checks that no memory is left.
  void free_all(const std::vector<Block*>& blocks) {
    for (Block* const block : blocks) {
      memory.free(block);
    }
    memory.empty_cache();
    CHECK_EQ(reserved(), 0);
    CHECK_EQ(runtime.memory_info(0).free, kDeviceBytes);
    is_well();
  }
};

std::vector<unsigned char> bytes_of(unsigned char content) {
  return std::vector<unsigned char>(kBytes, content);
}

} // namespace

TEST(a_new_block_gets_the_memory_and_waits_on_its_stream) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Rig rig(seed);
    const auto ones = bytes_of(1), twos = bytes_of(2);
    auto seen = bytes_of(0), after = bytes_of(0);
    Block* const first = rig.make();
    rig.fill(first, ones, kStream);
    rig.leave(first, seen);
    CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kBytes)); // spare
    Block* const next = rig.memory.allocate(kBytes, kDevice, rig.other);
    CHECK(rig.memory.data(next) != rig.memory.data(first));
    CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kBytes));
    rig.fill(next, twos, rig.other);
    rig.runtime.copy_async(after.data(), rig.memory.data(next), kBytes, rig.other);
    rig.is_well();
    rig.runtime.synchronize_device(0);
    CHECK(seen == ones && after == twos);
    rig.free_all({first, next});
  }
}

TEST(a_range_gets_the_memory_at_its_own_address) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Rig rig(seed);
    const auto ones = bytes_of(1), twos = bytes_of(2);
    auto seen = bytes_of(0), after = bytes_of(0), unused = bytes_of(0);
    Block* const waiting = rig.make();
    void* const address = rig.memory.data(waiting);
    rig.memory.detach(waiting);
    Block* const first = rig.make();
    rig.fill(first, ones, kStream);
    rig.leave(first, seen);
    CHECK(rig.memory.is_leaving(first));
    CHECK(rig.memory.attach(waiting, kStream));
    CHECK(rig.memory.data(waiting) == address);
    CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kBytes));
    rig.fill(waiting, twos, kStream);
    rig.leave(waiting, after); // and on to a third, before the first copy has ended
    Block* const third = rig.make();
    rig.fill(third, ones, kStream);
    rig.runtime.copy_async(unused.data(), rig.memory.data(third), kBytes, kStream);
    rig.is_well();
    rig.runtime.synchronize_device(0);
    CHECK(seen == ones && after == twos && unused == ones);
    CHECK(!rig.memory.is_leaving(first) && !rig.memory.is_leaving(waiting));
    rig.free_all({first, waiting, third});
  }
}

TEST(a_range_that_returns_at_once_waits_for_its_last_work) {
  Rig rig;
  const auto ones = bytes_of(1);
  auto seen = bytes_of(0);
  Block* const block = rig.make();
  void* const address = rig.memory.data(block);
  rig.fill(block, ones, kStream);
  rig.leave(block, seen);
  CHECK(rig.memory.attach(block, kStream));
  CHECK(seen == ones);
  CHECK(rig.memory.data(block) == address);
  rig.free_all({block});
}

TEST(other_sizes_wait_for_the_memory) {
  Rig rig;
  const auto ones = bytes_of(1);
  std::vector<std::vector<unsigned char>> seen(4, bytes_of(0));
  std::vector<Block*> blocks;
  for (std::size_t at = 0; at < 4; ++at) { // all of the cap
    blocks.push_back(rig.make());
    rig.fill(blocks.back(), ones, kStream);
  }
  for (std::size_t at = 0; at < 4; ++at) {
    rig.leave(blocks[at], seen[at]);
  }
  CHECK(rig.memory.try_allocate(2 * kBytes, kDevice, kStream) == nullptr); // never waits
  rig.is_well();
  blocks.push_back(rig.make(2 * kBytes));
  CHECK_EQ(std::ranges::count(seen, ones), 2);
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kCap));
  rig.free_all(blocks);
}

TEST(memory_of_freed_blocks_in_use_is_waited_for) {
  Rig rig;
  auto seen = bytes_of(0);
  Block* const waiting = rig.make();
  rig.memory.detach(waiting);
  Block* const all = rig.make(kCap);
  rig.runtime.copy_async(seen.data(), rig.memory.data(all), kBytes, rig.copies);
  rig.memory.record_stream(all, rig.copies);
  rig.memory.free(all);
  CHECK(rig.memory.attach(waiting, kStream, CachingManagedAllocator::Room::kWait));
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kBytes));
  rig.free_all({waiting});
}

TEST(a_release_waits_for_the_ranges_own_work_only) {
  int ahead = 0;
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Rig rig(seed);
    const auto ones = bytes_of(1);
    auto first = bytes_of(0), second = bytes_of(0);
    Block* const old = rig.make(2 * kBytes);
    Block* const kept = rig.make(2 * kBytes);
    rig.fill(old, ones, kStream);
    rig.runtime.copy_async(first.data(), rig.memory.data(old), kBytes, kStream);
    rig.memory.free(old);
    rig.fill(kept, ones, kStream);
    rig.runtime.copy_async(second.data(), rig.memory.data(kept), kBytes, kStream);
    Block* const next = rig.make(); // of another size: the memory of `old` is released for it
    CHECK(first == ones);
    ahead += second == ones ? 0 : 1;
    CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(3 * kBytes));
    rig.runtime.synchronize_device(0);
    CHECK(second == ones);
    rig.free_all({kept, next});
  }
  CHECK(ahead > 0);
}

TEST(a_range_may_be_freed_while_it_leaves) {
  Rig rig;
  const auto ones = bytes_of(1);
  auto seen = bytes_of(0);
  Block* const block = rig.make();
  rig.fill(block, ones, kStream);
  rig.leave(block, seen);
  rig.memory.free(block);
  rig.is_well();
  rig.free_all({}); // waits
  CHECK(seen == ones);
}

TEST(failing_calls_leave_everything_as_it_was) {
  Rig rig;
  const auto ones = bytes_of(1);
  EmulatedFailures failures(rig.runtime);
  Block* const first = rig.make();
  Block* const second = rig.make();
  rig.memory.detach(second);
  rig.fill(first, ones, kStream);
  rig.runtime.synchronize_device(0);
  const Event done = rig.memory.take_event(kStream);
  rig.runtime.record_event(done, kStream);
  failures.fail("reserve_range", 1);
  CHECK_THROWS(std::exception, rig.memory.detach_after(first, done, kStream));
  rig.is_well();
  CHECK(std::memcmp(rig.memory.data(first), ones.data(), kBytes) == 0);
  rig.memory.detach_after(first, done, kStream);
  failures.fail("map", 1);
  CHECK_THROWS(RuntimeFailure, rig.memory.attach(second, kStream));
  rig.is_well();
  failures.fail("map", 1);
  CHECK_THROWS(RuntimeFailure, rig.make());
  rig.is_well();
  rig.runtime.synchronize_device(0);
  CHECK(rig.memory.attach(second, kStream));
  CHECK(!rig.memory.is_leaving(first));
  const Event last = rig.memory.take_event(kStream);
  rig.runtime.record_event(last, kStream);
  rig.memory.detach_after(second, last, kStream);
  rig.runtime.synchronize_device(0);
  failures.fail("unmap", 1);
  CHECK(rig.memory.is_leaving(second)); // it cannot be unmapped
  rig.is_well();
  CHECK(!rig.memory.is_leaving(second));
  rig.free_all({first, second});
}

TEST(random_operations_keep_every_byte) {
  for (std::uint64_t seed = 1; seed <= 12; ++seed) {
    Rig rig(seed);
    std::mt19937 random(static_cast<unsigned>(seed));
    const auto pick = [&](std::size_t below) { return static_cast<std::size_t>(random()) % below; };
    struct Owned {
      Block* block = nullptr;
      std::vector<unsigned char> content;
      std::vector<unsigned char> host; ///< written when it left
      bool away = false;
    };
    std::vector<Owned> owned(7);
    for (Owned& each : owned) {
      each.host.resize(kBytes);
    }
    for (int step = 0; step < 300; ++step) {
      Owned& each = owned[pick(owned.size())];
      if (each.block == nullptr) {
        each.block = rig.memory.try_allocate(kBytes, kDevice, kStream);
        if (each.block != nullptr) {
          each.content = bytes_of(static_cast<unsigned char>(1 + pick(250)));
          rig.fill(each.block, each.content, kStream);
        }
      } else if (each.away) {
        if (pick(4) != 0 && rig.memory.attach(each.block, kStream)) {
          rig.runtime.synchronize_stream(rig.copies);
          CHECK(each.host == each.content);
          rig.fill(each.block, each.host, kStream);
          each.away = false;
        }
      } else if (pick(4) == 0) {
        rig.runtime.synchronize_device(0); // of the host's buffers, which are used again
        rig.memory.free(each.block);
        each.block = nullptr;
      } else {
        rig.leave(each.block, each.host);
        each.away = true;
      }
      CHECK(rig.reserved() <= static_cast<std::int64_t>(kCap));
      rig.is_well();
    }
    rig.runtime.synchronize_device(0);
    std::vector<Block*> blocks;
    for (const Owned& each : owned) {
      CHECK(!each.away || each.host == each.content);
      if (each.block != nullptr) {
        blocks.push_back(each.block);
      }
    }
    rig.free_all(blocks);
  }
}

HARNESS_MAIN()
