// A forked child has no managed memory. It may free its handles of the parent's blocks, and read a copy of those that
// host code may read.
#include <array>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>

#include "fork_helpers.h"
#include "recording/recording_runtime.h"
#include "runtime/emulated/emulated_runtime.h"

using namespace contract;

namespace {

const std::array<std::unique_ptr<ManagedRuntime> (*)(), 2> kRuntimes{
    [] { return std::unique_ptr<ManagedRuntime>(std::make_unique<RecordingRuntime>(2)); },
    [] { return std::unique_ptr<ManagedRuntime>(std::make_unique<EmulatedRuntime>(EmulatedConfig{.devices = 2})); }};

} // namespace

TEST(a_forked_child_may_free_but_not_allocate) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  auto& calls = static_cast<RecordingRuntime&>(*rig.runtime);
  const Stream other = rig.stream();
  Block* const plain = rig.allocate(64 * MiB);
  Block* const shared = rig.allocate(3 * MiB);
  rig.allocator->record_stream(shared, other);
  rig.allocator->free(rig.allocate(12 * MiB)); // cached
  const int code = in_child(*rig.allocator, [&] {
    calls.clear_calls();
    rig.allocator->free(plain);
    rig.allocator->free(shared);
    if (rig.allocator->check() || rig.allocator->statistics().allocation[0].current != 0) {
      return 1;
    }
    if (rig.allocator->empty_cache() != 0) {
      return 2;
    }
    try {
      rig.allocate(512); // cached memory would belong to the parent
      return 3;
    } catch (const RuntimeFailure& error) {
      if (std::string(error.what()).find("forked child") == std::string::npos) {
        return 4;
      }
    }
    if (rig.allocate(0) != nullptr) {
      return 5;
    }
    rig.allocator.reset();
    return calls.calls().empty() ? 0 : 6; // no runtime call at all
  });
  CHECK_EQ(code, 0);
  // The parent is not affected.
  CHECK_EQ(rig.allocator->statistics().allocation[0].current, 2);
  rig.allocator->free(plain);
  rig.allocator->free(shared);
  rig.check();
}

TEST(forking_while_threads_allocate_does_not_hang_the_child) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; ++i) {
    threads.emplace_back([&, i] {
      const Location home = i == 0 ? kDevice : Location::host();
      while (!stop) {
        rig.allocator->free(rig.allocator->allocate(4096, home, i == 0 ? kStream : Stream::host()));
      }
    });
  }
  Block* const block = rig.allocate(1000);
  int code = 0;
  for (int i = 0; i < 30 && code == 0; ++i) {
    code = in_child(*rig.allocator, [&] {
      rig.allocator->free(block);
      return rig.allocator->check() ? 1 : 0;
    });
  }
  stop = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  CHECK_EQ(code, 0);
  rig.allocator->free(block);
  rig.check();
}

TEST(a_forked_child_has_host_blocks_at_their_addresses_and_no_others) {
  for (const auto make : kRuntimes) {
    Rig rig(make(), true);
    constexpr std::size_t kBig = 64 * MiB;
    Block* const big = filled(rig, kBig, Location::host(), 1);
    Block* const small = filled(rig, 700, Location::host(), 2);
    Block* const odd = filled(rig, 3 * MiB + 5, Location::host(), 3);
    Block* const device = filled(rig, kBig, kDevice, 4);
    Block* const small_device = filled(rig, 700, kDevice, 5);
    const int code = in_child(*rig.allocator, [&] {
      if (!holds(rig, big, kBig, 1) || !holds(rig, small, 700, 2) || !holds(rig, odd, 3 * MiB + 5, 3)) {
        return 1;
      }
      if (is_mapped(rig.address(device)) || is_mapped(rig.address(device) + kBig - 1) ||
          is_mapped(rig.address(small_device))) {
        return 2;
      }
      std::memset(rig.allocator->data(big), 6, kBig); // its own copy
      return 0;
    });
    CHECK_EQ(code, 0);
    CHECK(holds(rig, big, kBig, 1));
    CHECK(holds(rig, device, kBig, 4));
    for (Block* const block : {big, small, odd, device, small_device}) {
      rig.allocator->free(block);
    }
    rig.check();
  }
}

TEST(a_former_host_block_is_readable_in_a_child_after_its_relocation) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  constexpr std::size_t kBytes = 8 * MiB;
  rig.allocator->set_cap(0, 4 * kBytes + 2 * MiB); // plus a segment for small requests
  std::vector<Block*> blocks;
  for (int i = 0; i < 4; ++i) {
    blocks.push_back(filled(rig, kBytes, kDevice, i));
  }
  for (const std::size_t i : {1, 3}) {
    rig.allocator->set_home(blocks[i], Location::host(), Stream::host());
    rig.allocator->set_home(blocks[i], kDevice, kStream);
  }
  rig.allocator->free(blocks[0]);
  rig.allocator->free(blocks[2]);
  const auto moves =
      rig.allocator->reserve_moves(2 * kBytes, 0, kStream, [](void*, std::size_t) { return 1.0; }, agree);
  CHECK_EQ(moves.size(), std::size_t{1});
  Block*& moved = moves[0].from == blocks[1] ? blocks[1] : blocks[3];
  const int value = moved == blocks[1] ? 1 : 3;
  std::memcpy(rig.allocator->data(moves[0].to), rig.allocator->data(moved), kBytes);
  moved = moves[0].to;
  rig.allocator->commit(moves[0]);
  CHECK_EQ(in_child(*rig.allocator, [&] { return holds(rig, moved, kBytes, value) ? 0 : 1; }), 0);
  rig.allocator->free(blocks[1]);
  rig.allocator->free(blocks[3]);
}

TEST(a_former_host_block_is_readable_in_a_child_until_it_is_reused) {
  Rig rig(std::make_unique<RecordingRuntime>(2), true);
  constexpr std::size_t kBytes = 12 * MiB;
  // moved to a device: a tensor with its first address may still exist
  Block* const left = filled(rig, kBytes, Location::host(), 1);
  rig.allocator->set_home(left, kDevice, kStream);
  Block* const came = filled(rig, kBytes, kDevice, 2);
  rig.allocator->set_home(came, Location::host(), Stream::host());
  Block* const passed = filled(rig, kBytes, kDevice, 3); // moved to the host and on to another device
  rig.allocator->set_home(passed, Location::host(), Stream::host());
  rig.allocator->set_home(passed, Location::device(1), Stream::default_of(1));
  Block* const moved = filled(rig, kBytes, kDevice, 4); // moved from device to device
  rig.allocator->set_home(moved, Location::device(1), Stream::default_of(1));
  Block* const freed = filled(rig, kBytes, Location::host(), 5);
  const std::uintptr_t freed_at = rig.address(freed);
  rig.allocator->set_home(freed, kDevice, kStream);
  rig.allocator->free(freed);
  const auto check = [&](bool reused) {
    return in_child(*rig.allocator, [&] {
      if (!holds(rig, left, kBytes, 1) || !holds(rig, came, kBytes, 2) || !holds(rig, passed, kBytes, 3)) {
        return 1;
      }
      return is_mapped(rig.address(moved)) ? 2 : is_mapped(freed_at) ? reused ? 4 : 3 : 0;
    });
  };
  CHECK_EQ(check(false), 0);
  Block* const reused = rig.allocate(kBytes);
  CHECK_EQ(rig.address(reused), freed_at);
  CHECK_EQ(check(true), 0);
  for (Block* const block : {left, came, passed, moved, reused}) {
    rig.allocator->free(block);
  }
  rig.check();
}

TEST(a_child_copies_only_the_pages_of_small_host_blocks) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  std::vector<Block*> blocks; // 512 bytes each, eight in a page; every 64th stays allocated
  for (int i = 0; i < 1024; ++i) {
    blocks.push_back(filled(rig, 512, Location::host(), i % 251));
  }
  for (int i = 0; i < 1024; ++i) {
    if (i % 64 != 5) {
      rig.allocator->free(blocks[static_cast<std::size_t>(i)]);
    }
  }
  const int code = in_child(*rig.allocator, [&] {
    for (std::size_t i = 5; i < 1024; i += 64) {
      if (!holds(rig, blocks[i], 512, static_cast<int>(i) % 251)) {
        return 1;
      }
      if (is_mapped(rig.address(blocks[i]) + 4 * 4096)) { // half way to the next one
        return 2;
      }
    }
    return 0;
  });
  CHECK_EQ(code, 0);
  for (std::size_t i = 5; i < 1024; i += 64) {
    rig.allocator->free(blocks[i]);
  }
  rig.check();
}

TEST(a_child_of_a_child_reads_the_childs_copies) {
  Rig rig(std::make_unique<RecordingRuntime>(1), true);
  constexpr std::size_t kBytes = 8 * MiB;
  Block* const block = filled(rig, kBytes, Location::host(), 1);
  const int code = in_child(*rig.allocator, [&] {
    std::memset(rig.allocator->data(block), 2, kBytes);
    const int inner = in_child(*rig.allocator, [&] {
      if (!holds(rig, block, kBytes, 2)) {
        return 1;
      }
      std::memset(rig.allocator->data(block), 3, kBytes);
      rig.allocator->free(block);
      return 0;
    });
    return inner != 0 ? 10 + inner : holds(rig, block, kBytes, 2) ? 0 : 2;
  });
  CHECK_EQ(code, 0);
  CHECK(holds(rig, block, kBytes, 1));
  rig.allocator->free(block);
}

HARNESS_MAIN()
