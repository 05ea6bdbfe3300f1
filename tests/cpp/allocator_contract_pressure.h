// Contract cases about memory pressure: refused requests, released caches, callbacks, the limit.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "allocator_rig.h"

namespace contract {

inline void out_of_memory_errors_say_where_the_bytes_are(const MakeRig& make) {
  Rig rig = make();
  Block* const filler = rig.leave_room(64 * MiB);
  Block* const held = rig.allocate(32 * MiB);
  const std::int64_t allocated = rig.allocator->statistics().allocated_bytes[0].current;
  try {
    rig.allocate(48 * MiB);
    harness::fail(__FILE__, __LINE__, "48 MiB were found in 32");
  } catch (const OutOfMemory& error) {
    const std::string message = error.what();
    CHECK(message.find("48.00 MiB") != message.npos);
    CHECK(message.find("largest free block") != message.npos);
    CHECK(message.find("device 1") != message.npos);
    CHECK(message.find("limit") != message.npos);
    CHECK_EQ(error.bytes, 48 * MiB);
    CHECK(error.cause == (rig.managed ? OutOfMemory::Cause::kLimit : OutOfMemory::Cause::kDevice));
  }
  rig.check();
  CHECK_EQ(rig.allocator->statistics().allocated_bytes[0].current, allocated);
  CHECK_EQ(rig.allocator->statistics().num_ooms, 1);
  Block* const fits = rig.allocate(32 * MiB);
  rig.allocator->free(fits);
  rig.allocator->free(held);
  rig.allocator->free(filler);
  rig.check();
}

inline void absurd_sizes_are_out_of_memory(const MakeRig& make) {
  Rig rig = make();
  for (const std::size_t bytes : {~std::size_t{0}, ~std::size_t{0} / 2, ~std::size_t{0} / 4, std::size_t{1} << 60}) {
    CHECK_THROWS(OutOfMemory, rig.allocate(bytes));
    rig.check();
  }
  CHECK_EQ(rig.reserved(), 0);
}

inline void cached_segments_are_released_under_pressure(const MakeRig& make) {
  Rig rig = make();
  Block* const filler = rig.leave_room(64 * MiB);
  Block* const first = rig.allocate(40 * MiB);
  rig.allocator->free(first);
  Block* const second = rig.allocate(48 * MiB); // does not fit beside the cached 40 MiB
  CHECK_EQ(rig.allocator->statistics().num_alloc_retries, 1);
  CHECK_EQ(rig.allocator->statistics().num_ooms, 0);
  rig.allocator->free(second);
  rig.allocator->free(filler);
  rig.check();
}

inline void free_neighbours_of_other_streams_are_merged_under_pressure(const MakeRig& make) {
  Rig rig = make();
  const Stream other = rig.stream();
  Block* const filler = rig.leave_room(64 * MiB);
  Block* const whole = rig.allocate(64 * MiB);
  const std::uintptr_t address = rig.address(whole);
  rig.allocator->free(whole);
  Block* const one = rig.allocate(20 * MiB); // | one | two | wall |
  Block* const two = rig.allocate(20 * MiB, other);
  Block* const wall = rig.allocate(24 * MiB);
  rig.allocator->free(one);
  rig.allocator->free(two);
  rig.check();
  Block* const both = rig.allocate(36 * MiB);
  CHECK_EQ(rig.address(both), address);
  CHECK_EQ(rig.allocator->bytes(both), 36 * MiB);
  rig.check();
  Block* const rest = rig.allocate(100, other); // the small request needs a segment, and only 4 MiB are left
  CHECK_EQ(rig.address(rest), address + 36 * MiB);
  rig.check();
  for (Block* const block : {both, rest, wall, filler}) {
    rig.allocator->free(block);
    rig.check();
  }
}

inline void pressure_callbacks_run_with_no_lock_held(const MakeRig& make) {
  struct Callback final : PressureCallback {
    Rig* rig = nullptr;
    Block* block = nullptr;
    std::size_t asked = 0;
    Location home;
    Stream stream;
    bool make_room(std::size_t bytes, Location for_home, Stream for_stream) override {
      ++asked;
      home = for_home;
      stream = for_stream;
      CHECK_EQ(bytes, 48 * MiB);
      CHECK(!rig->allocator->check()); // locks the allocator's mutex
      const bool had = block != nullptr;
      rig->allocator->free(std::exchange(block, nullptr));
      return had;
    }
  } callback;
  Rig rig = make();
  Block* const filler = rig.leave_room(64 * MiB);
  callback.rig = &rig;
  callback.block = rig.allocate(32 * MiB);
  rig.allocator->set_pressure_callback(&callback);
  Block* const block = rig.allocate(48 * MiB);
  CHECK_EQ(callback.asked, std::size_t{1});
  CHECK(callback.home == kDevice && callback.stream == kStream);
  CHECK_THROWS(OutOfMemory, rig.allocate(48 * MiB)); // the callback has nothing left to free
  CHECK_EQ(callback.asked, std::size_t{2});
  rig.allocator->set_pressure_callback(nullptr);
  CHECK_THROWS(OutOfMemory, rig.allocate(48 * MiB));
  CHECK_EQ(callback.asked, std::size_t{2});
  rig.allocator->free(block);
  rig.allocator->free(filler);
  rig.check();
}

inline void the_limit_is_never_exceeded(const MakeRig& make) {
  Rig rig = make();
  if (!rig.managed) {
    return; // the limit applies to managed memory only
  }
  rig.runtime->set_limit(100 * MiB);
  std::vector<Block*> blocks;
  for (std::size_t bytes = 512;; bytes = bytes * 3 % (30 * MiB) + 512) {
    try {
      blocks.push_back(rig.allocate(bytes));
    } catch (const OutOfMemory&) {
      break;
    }
    CHECK(rig.reserved() <= static_cast<std::int64_t>(100 * MiB));
    CHECK_EQ(rig.runtime->managed_bytes(), static_cast<std::size_t>(rig.reserved()));
  }
  CHECK(blocks.size() > 5);
  for (Block* const block : blocks) {
    rig.allocator->free(block);
  }
  rig.allocator->empty_cache();
  CHECK_EQ(rig.runtime->managed_bytes(), std::size_t{0});
  rig.check();
}

} // namespace contract
