// Detached address ranges that get the memory of a host copy, and ranges of the host.
#include <cstring>
#include <memory>
#include <optional>
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

using Memory = CachingManagedAllocator::Memory;

constexpr std::size_t kCap = 8 * MiB;

/// With a seed, queued work runs late, in an order that the seed decides and that streams and events allow.
struct Rig {
  EmulatedRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime), options()};
  PinnedSegmentSource* source = new PinnedSegmentSource(runtime);
  CachingManagedAllocator host{runtime, std::unique_ptr<SegmentSource>(source)};
  Stream copies = runtime.create_stream(0, 0);

  explicit Rig(std::optional<std::uint64_t> seed = 1) : runtime(config(seed)) {
    memory.set_cap(0, kCap);
  }
  Block* make_detached(std::size_t bytes = kBytes) {
    Block* const block = memory.allocate(bytes, kDevice, kStream);
    memory.detach(block);
    return block;
  }
  Block* make_copy(std::size_t bytes = kBytes) {
    return host.allocate(bytes, Location::host(), copies, Memory::kRange);
  }
  unsigned char* data(Block* block) {
    return static_cast<unsigned char*>(memory.data(block));
  }
  /// Takes the memory of the host copy out of the range after what is queued on kStream now.
  void leave(Block* block) {
    const Event done = memory.take_event(kStream);
    runtime.record_event(done, kStream);
    memory.unmap_host_copy(block, done, kStream);
    is_well();
  }
  void is_well() const {
    for (const CachingManagedAllocator* const each : {&memory, &host}) {
      if (const auto wrong = each->check()) {
        harness::fail(__FILE__, __LINE__, *wrong);
      }
    }
  }
  /// Frees the blocks, and checks that no memory is left.
  void free_all(const std::vector<Block*>& blocks, const std::vector<Block*>& copies_of_them) {
    for (Block* const block : blocks) {
      memory.free(block);
    }
    for (Block* const copy : copies_of_them) {
      host.free(copy);
    }
    memory.empty_cache();
    host.empty_cache();
    is_well();
    CHECK_EQ(runtime.memory_info(0).free, kDeviceBytes);
    CHECK_EQ(source->bytes(), std::size_t{0});
  }
};

} // namespace

TEST(a_range_of_the_host_is_pinned_memory_and_is_cached) {
  Rig rig;
  Block* const copy = rig.make_copy(kBytes - 7);
  CHECK(CachingManagedAllocator::is_range(copy));
  CHECK(rig.runtime.is_pinned_ptr(rig.host.data(copy)));
  CHECK_EQ(rig.runtime.memory_info(0).free, kDeviceBytes); // it takes none of the device's
  CHECK_EQ(rig.source->bytes(), kBytes);
  void* const address = rig.host.data(copy);
  rig.host.free(copy);
  Block* const again = rig.make_copy();
  CHECK(rig.host.data(again) == address);
  Block* const plain = rig.host.allocate(kBytes, Location::host(), rig.copies);
  CHECK(!CachingManagedAllocator::is_range(plain));
  rig.free_all({}, {again, plain});
}

TEST(the_limit_of_pinned_memory_counts_ranges) {
  Rig rig;
  rig.source->set_limit(2 * kBytes);
  Block* const copy = rig.make_copy();
  Block* const other = rig.make_copy();
  CHECK_THROWS(OutOfMemory, rig.make_copy());
  rig.host.free(copy);
  Block* const larger = [&]() -> Block* { // the cached range makes room
    rig.host.free(other);
    return rig.make_copy(2 * kBytes);
  }();
  CHECK_EQ(rig.source->bytes(), 2 * kBytes);
  rig.free_all({}, {larger});
}

TEST(the_device_uses_the_host_copy_at_the_ranges_address) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Rig rig(seed);
    Block* const block = rig.make_detached();
    Block* const copy = rig.make_copy();
    std::memset(rig.host.data(copy), 7, kBytes);
    rig.memory.map_host_copy(block, copy);
    rig.is_well();
    std::vector<unsigned char> seen(kBytes);
    rig.runtime.copy_async(seen.data(), rig.data(block), kBytes, kStream);
    rig.runtime.zero_async(rig.data(block), kBytes / 2, kStream);
    rig.leave(block);
    CHECK(rig.memory.attach(block, kStream)); // waits for the work
    CHECK(seen == std::vector<unsigned char>(kBytes, 7));
    std::memset(rig.data(block), 9, kBytes); // the device's memory
    const auto* const bytes = static_cast<const unsigned char*>(rig.host.data(copy));
    CHECK(bytes[0] == 0 && bytes[kBytes / 2] == 7);
    rig.is_well();
    rig.free_all({block}, {copy});
  }
}

TEST(a_range_may_be_freed_while_work_uses_its_host_copy) {
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    Rig rig(seed);
    Block* const block = rig.make_detached();
    Block* const copy = rig.make_copy();
    std::memset(rig.host.data(copy), 7, kBytes);
    rig.memory.map_host_copy(block, copy);
    std::vector<unsigned char> seen(kBytes);
    rig.runtime.copy_async(seen.data(), rig.data(block), kBytes, kStream);
    rig.host.record_stream(copy, kStream); // as the owner does: the copy is reused after that work
    rig.leave(block);
    rig.host.free(copy);
    rig.memory.free(block);
    rig.host.empty_cache();
    rig.runtime.synchronize_stream(kStream);
    CHECK(seen == std::vector<unsigned char>(kBytes, 7));
    rig.free_all({}, {});
  }
}

TEST(a_free_does_not_wait) {
  Rig rig(std::nullopt);
  Block* const block = rig.make_detached();
  Block* const evicted = rig.memory.allocate(kBytes, kDevice, kStream);
  Block* const copy = rig.make_copy();
  std::memset(rig.host.data(copy), 7, kBytes);
  rig.memory.map_host_copy(block, copy);
  std::vector<unsigned char> seen(kBytes);
  rig.runtime.hold_device(0);
  rig.runtime.copy_async(seen.data(), rig.data(block), kBytes, kStream);
  rig.runtime.zero_async(rig.data(evicted), kBytes, kStream);
  rig.leave(block);
  const Event done = rig.memory.take_event(kStream);
  rig.runtime.record_event(done, kStream);
  rig.memory.detach_after(evicted, done, kStream);
  rig.memory.free(block); // would wait for ever
  rig.memory.free(evicted);
  rig.is_well();
  CHECK(seen == std::vector<unsigned char>(kBytes));
  rig.runtime.release_device(0);
  rig.free_all({}, {copy});
  CHECK(seen == std::vector<unsigned char>(kBytes, 7));
}

TEST(one_memory_is_used_again_and_again) {
  Rig rig;
  Block* const block = rig.make_detached();
  Block* const copy = rig.make_copy();
  for (unsigned char round = 1; round < 5; ++round) {
    rig.memory.map_host_copy(block, copy); // also while it leaves
    rig.data(block)[round] = round;
    rig.leave(block);
  }
  CHECK_EQ(rig.runtime.counters(0).map_calls, std::size_t{1 + 4});
  rig.memory.map_host_copy(block, copy);
  for (unsigned char round = 1; round < 5; ++round) {
    CHECK_EQ(int{rig.data(block)[round]}, int{round});
  }
  rig.leave(block);
  rig.free_all({block}, {copy});
}

TEST(bad_calls_are_refused_and_change_nothing) {
  Rig rig;
  Block* const block = rig.make_detached();
  Block* const attached = rig.memory.allocate(kBytes, kDevice, kStream);
  Block* const copy = rig.make_copy();
  Block* const larger = rig.make_copy(2 * kBytes);
  Block* const plain = rig.host.allocate(kBytes, Location::host(), rig.copies);
  const auto bad = [&](auto call) {
    CHECK_THROWS(InvalidArgument, call());
    rig.is_well();
  };
  bad([&] { rig.memory.map_host_copy(attached, copy); });
  bad([&] { rig.memory.map_host_copy(nullptr, copy); });
  bad([&] { rig.memory.map_host_copy(block, larger); });
  bad([&] { rig.memory.map_host_copy(block, plain); });
  bad([&] { rig.memory.map_host_copy(block, attached); });
  bad([&] { rig.memory.unmap_host_copy(block, Event{}, kStream); });
  rig.memory.map_host_copy(block, copy);
  bad([&] { rig.memory.map_host_copy(block, copy); });
  bad([&] { rig.memory.attach(block, kStream); });
  bad([&] { rig.memory.unmap_host_copy(attached, Event{}, kStream); });
  rig.leave(block);
  rig.free_all({block, attached}, {copy, larger, plain});
}

TEST(each_failing_call_changes_nothing) {
  Rig rig;
  Block* const block = rig.make_detached();
  EmulatedFailures failures(rig.runtime);
  for (const char* const call : {"reserve_range", "map"}) {
    failures.fail(call, 1);
    CHECK_THROWS(RuntimeFailure, rig.make_copy());
    CHECK_EQ(rig.source->bytes(), std::size_t{0});
    rig.is_well();
  }
  failures.fail("allocate_piece", 1);
  Block* const copy = rig.make_copy(); // the next attempt, after cached memory was released
  failures.fail("map", 1);
  CHECK_THROWS(RuntimeFailure, rig.memory.map_host_copy(block, copy));
  rig.is_well();
  rig.memory.map_host_copy(block, copy);
  rig.data(block)[0] = 5;
  rig.leave(block);
  failures.fail("unmap", 1);
  CHECK_THROWS(RuntimeFailure, rig.memory.attach(block, kStream)); // it is leaving still
  rig.is_well();
  CHECK(rig.memory.attach(block, kStream));
  CHECK_EQ(int{static_cast<unsigned char*>(rig.host.data(copy))[0]}, 5);
  rig.free_all({block}, {copy});
}

HARNESS_MAIN()
