// The allocator's contract, as cases that every runtime and every source of segments has to pass.
// A test file makes a rig for each and registers the suite under a prefix.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "allocator/size_classes.h"
#include "allocator_rig.h"

namespace contract {

using MakeRig = std::function<Rig()>;

/// Every case by name.
struct ContractCase {
  const char* name;
  void (*run)(const MakeRig&);
};
const std::vector<ContractCase>& contract_cases();

inline bool register_contract(const std::string& prefix, const MakeRig& make) {
  for (const ContractCase& test : contract_cases()) {
    harness::Registrar(prefix + "_" + test.name, [test, make] { test.run(make); });
  }
  return true;
}

// --- requests ---------------------------------------------------------------------------------------------

inline void zero_bytes_are_nothing(const MakeRig& make) {
  Rig rig = make();
  Block* const block = rig.allocate(0);
  CHECK(block == nullptr);
  CHECK(rig.allocator->data(block) == nullptr);
  rig.allocator->free(block);
  CHECK_EQ(rig.reserved(), 0);
}

inline void blocks_are_aligned_and_apart(const MakeRig& make) {
  Rig rig = make();
  std::vector<Block*> blocks;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{511}, std::size_t{512}, std::size_t{513}, 1 * MiB,
                                  1 * MiB + 1, 3 * MiB + 7, 10 * MiB - 1, 10 * MiB, 10 * MiB + 1, 32 * MiB, 33 * MiB}) {
    Block* const block = rig.allocate(bytes);
    CHECK_EQ(rig.address(block) % kBlockAlignment, std::size_t{0});
    CHECK_EQ(rig.allocator->requested_bytes(block), bytes);
    CHECK(rig.allocator->bytes(block) >= bytes);
    if (bytes >= kWholePagesRequest) { // starts on large pages and fills them
      CHECK_EQ(rig.address(block) % kLargeGranularity, std::size_t{0});
      CHECK_EQ(rig.allocator->bytes(block) % kLargeGranularity, std::size_t{0});
    }
    blocks.push_back(block);
    rig.check();
  }
  std::ranges::sort(blocks, {}, [&](const Block* block) { return rig.address(block); });
  for (std::size_t i = 1; i < blocks.size(); ++i) {
    CHECK(rig.address(blocks[i - 1]) + rig.allocator->bytes(blocks[i - 1]) <= rig.address(blocks[i]));
  }
  for (Block* const block : blocks) {
    rig.allocator->free(block);
    rig.check();
  }
}

inline void unknown_homes_and_streams_are_refused(const MakeRig& make) {
  Rig rig = make();
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, Location::device(2), kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, Location{-2}, kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, kDevice, Stream::default_of(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, kDevice, Stream{-2, nullptr}));
  CHECK_THROWS(InvalidArgument, rig.allocator->statistics(Location::device(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->reset_peak_statistics(Location::device(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->reset_accumulated_statistics(Location::device(2)));
  Block* const block = rig.allocate(100);
  CHECK_THROWS(InvalidArgument, rig.allocator->record_stream(block, Stream::default_of(2)));
  CHECK_THROWS(InvalidArgument, rig.allocator->set_home(block, Location::device(2), kStream));
  CHECK_THROWS(InvalidArgument, rig.allocator->record_stream(nullptr, kStream));
  CHECK(rig.allocator->home(block) == kDevice);
  rig.allocator->free(block);
  rig.check();
}

inline void the_host_is_a_home_of_managed_memory_only(const MakeRig& make) {
  Rig rig = make();
  if (!rig.managed) {
    CHECK_THROWS(InvalidArgument, rig.allocator->allocate(1, Location::host(), Stream::host()));
    return;
  }
  Block* const block = rig.allocator->allocate(5000, Location::host(), Stream::host());
  CHECK(rig.allocator->home(block).is_host());
  CHECK(rig.allocator->stream(block).is_host());
  CHECK_EQ(rig.allocator->statistics(Location::host()).allocation[0].current, 1);
  CHECK_EQ(rig.allocator->statistics(kDevice).reserved_bytes[0].current, 0);
  rig.allocator->free(block);
  rig.check();
}

// --- reuse ------------------------------------------------------------------------------------------------

inline void a_freed_block_is_reused(const MakeRig& make) {
  Rig rig = make();
  for (const std::size_t bytes : {std::size_t{700}, 3 * MiB, 40 * MiB}) {
    Block* const first = rig.allocate(bytes);
    const std::uintptr_t address = rig.address(first);
    rig.allocator->free(first);
    const std::int64_t reserved = rig.reserved();
    Block* const second = rig.allocate(bytes);
    CHECK_EQ(rig.address(second), address);
    CHECK_EQ(rig.reserved(), reserved);
    rig.allocator->free(second);
    rig.check();
  }
}

inline void the_best_fit_is_taken_lowest_address_first(const MakeRig& make) {
  Rig rig = make();
  // Holes of 8, 4, 4 and 6 units, kept apart by blocks in use.
  constexpr std::size_t kUnit = 4 * KiB;
  std::vector<Block*> holes, walls;
  for (const std::size_t units : {8, 4, 4, 6}) {
    holes.push_back(rig.allocate(units * kUnit));
    walls.push_back(rig.allocate(kUnit));
  }
  std::vector<std::uintptr_t> at;
  for (Block* const hole : holes) {
    at.push_back(rig.address(hole));
  }
  for (const std::size_t i : {2, 0, 3, 1}) { // the order of freeing does not matter
    rig.allocator->free(holes[i]);
  }
  Block* const four = rig.allocate(4 * kUnit);
  CHECK_EQ(rig.address(four), std::min(at[1], at[2]));
  Block* const five = rig.allocate(5 * kUnit);
  CHECK_EQ(rig.address(five), at[3]);
  Block* const seven = rig.allocate(7 * kUnit);
  CHECK_EQ(rig.address(seven), at[0]);
  rig.check();
  for (Block* const block : {four, five, seven}) {
    rig.allocator->free(block);
  }
  for (Block* const wall : walls) {
    rig.allocator->free(wall);
  }
  rig.check();
}

inline void neighbours_coalesce_in_any_order(const MakeRig& make) {
  Rig rig = make();
  std::array<std::size_t, 4> order{0, 1, 2, 3};
  do {
    std::array<Block*, 4> blocks{};
    for (Block*& block : blocks) {
      block = rig.allocate(kSmallSegment / 4);
    }
    CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(kSmallSegment));
    for (const std::size_t i : order) {
      rig.allocator->free(blocks[i]);
      rig.check();
    }
    const auto snapshot = rig.allocator->snapshot();
    CHECK_EQ(snapshot.size(), std::size_t{1});
    CHECK_EQ(snapshot[0].blocks.size(), std::size_t{1});
    CHECK_EQ(snapshot[0].blocks[0].bytes, kSmallSegment);
  } while (std::ranges::next_permutation(order).found);
}

inline void homes_do_not_share_blocks(const MakeRig& make) {
  Rig rig = make();
  rig.allocator->free(rig.allocate(1000));
  Block* const other = rig.allocate(1000, Stream::default_of(1));
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(2 * kSmallSegment));
  CHECK_EQ(rig.allocator->statistics(Location::device(1)).reserved_bytes[1].current,
           static_cast<std::int64_t>(kSmallSegment));
  rig.allocator->free(other);
  rig.check();
}

inline void another_stream_takes_a_block_before_a_new_segment_is_made(const MakeRig& make) {
  Rig rig = make();
  const Stream other = rig.stream();
  Block* const first = rig.allocate(12 * MiB);
  const std::uintptr_t address = rig.address(first);
  rig.allocator->free(first);
  Block* const second = rig.allocate(12 * MiB, other);
  CHECK_EQ(rig.address(second), address);
  CHECK(rig.allocator->stream(second) == other);
  CHECK_EQ(rig.allocator->statistics().num_device_alloc, 1);
  rig.allocator->free(second);
  rig.check();
}

inline void blocks_that_other_streams_used_come_back(const MakeRig& make) {
  Rig rig = make();
  const Stream other = rig.stream();
  Block* const block = rig.allocate(12 * MiB);
  rig.allocator->record_stream(block, other);
  rig.allocator->record_stream(block, other);
  rig.allocator->record_stream(block, Stream::host());
  rig.allocator->record_stream(block, kStream);
  rig.allocator->free(block);
  rig.check();
  CHECK_EQ(rig.allocator->statistics().allocation[0].current, 0);
  CHECK_EQ(rig.allocator->empty_cache(), 12 * MiB);
  CHECK_EQ(rig.reserved(), 0);
  rig.check();
}

inline void a_moved_block_is_filed_where_it_is(const MakeRig& make) {
  Rig rig = make();
  Block* const block = rig.allocate(12 * MiB);
  if (!rig.managed) {
    CHECK_THROWS(InvalidArgument, rig.allocator->set_home(block, Location::device(1), Stream::default_of(1)));
    rig.allocator->free(block);
    return;
  }
  const std::uintptr_t address = rig.address(block);
  const Location there = Location::device(1);
  rig.allocator->set_home(block, there, Stream::default_of(1));
  rig.check();
  CHECK(rig.allocator->home(block) == there);
  CHECK_EQ(rig.allocator->statistics(there).allocated_bytes[0].current, static_cast<std::int64_t>(12 * MiB));
  CHECK_EQ(rig.allocator->statistics(kDevice).allocated_bytes[0].current, 0);
  CHECK_EQ(rig.allocator->statistics().allocated_bytes[0].peak, static_cast<std::int64_t>(12 * MiB));
  rig.allocator->free(block);
  rig.runtime->synchronize_device(0);
  Block* const reused = rig.allocate(12 * MiB, Stream::default_of(1));
  CHECK_EQ(rig.address(reused), address);
  CHECK_EQ(rig.allocator->statistics().num_device_alloc, 1);
  rig.allocator->free(reused);
  rig.check();
}

inline void large_blocks_stay_whole_under_max_split(const MakeRig& make) {
  Rig rig = make();
  rig.allocator->set_options(AllocatorOptions{.max_split_bytes = 32 * MiB, .segment_min_bytes = std::nullopt});
  CHECK_THROWS(InvalidArgument, rig.allocator->set_options(AllocatorOptions{.max_split_bytes = 1 * MiB}));
  CHECK_EQ(*rig.allocator->options().max_split_bytes, 32 * MiB);
  Block* const large = rig.allocate(64 * MiB);
  const std::uintptr_t address = rig.address(large);
  rig.allocator->free(large);
  Block* const much_smaller = rig.allocate(12 * MiB); // would waste 52 MiB
  CHECK(rig.address(much_smaller) != address);
  Block* const little_smaller = rig.allocate(50 * MiB);
  CHECK_EQ(rig.address(little_smaller), address);
  CHECK_EQ(rig.allocator->bytes(little_smaller), 64 * MiB); // whole
  rig.check();
  rig.allocator->free(much_smaller);
  rig.allocator->free(little_smaller);
  rig.check();
}

// --- looking at it --------------------------------------------------------------------------------------------

inline void addresses_find_their_block(const MakeRig& make) {
  Rig rig = make();
  Block* const one = rig.allocate(1000);
  Block* const two = rig.allocate(2000);
  for (Block* const block : {one, two}) {
    const auto* const data = static_cast<const char*>(rig.allocator->data(block));
    CHECK(rig.allocator->find(data) == block);
    CHECK(rig.allocator->find(data + rig.allocator->bytes(block) - 1) == block);
    CHECK(rig.allocator->find(data + rig.allocator->bytes(block)) != block);
  }
  int elsewhere = 0;
  CHECK(rig.allocator->find(&elsewhere) == nullptr);
  CHECK(rig.allocator->find(nullptr) == nullptr);
  const void* const was = rig.allocator->data(one);
  rig.allocator->free(one);
  CHECK(rig.allocator->find(was) == nullptr);
  rig.allocator->free(two);
}

inline void statistics_follow_what_happens(const MakeRig& make) {
  Rig rig = make();
  Block* const small = rig.allocate(1000);
  Block* const large = rig.allocate(3 * MiB);
  const Statistics now = rig.allocator->statistics();
  CHECK_EQ(now.allocation[0].current, 2);
  CHECK_EQ(now.allocation[1].current, 1);
  CHECK_EQ(now.allocation[2].current, 1);
  CHECK_EQ(now.requested_bytes[0].current, static_cast<std::int64_t>(1000 + 3 * MiB));
  CHECK_EQ(now.allocated_bytes[1].current, 1024);
  CHECK_EQ(now.reserved_bytes[0].current, static_cast<std::int64_t>(kSmallSegment + kMediumSegment));
  CHECK_EQ(now.segment[0].current, 2);
  CHECK_EQ(now.inactive_split[0].current, 2);
  CHECK_EQ(now.inactive_split_bytes[1].current, static_cast<std::int64_t>(kSmallSegment - 1024));
  CHECK_EQ(now.active_bytes[0].current, now.allocated_bytes[0].current);
  rig.allocator->free(small);
  rig.allocator->free(large);
  const Statistics after = rig.allocator->statistics();
  CHECK_EQ(after.allocation[0].current, 0);
  CHECK_EQ(after.allocation[0].peak, 2);
  CHECK_EQ(after.allocation[0].allocated, 2);
  CHECK_EQ(after.allocation[0].freed, 2);
  CHECK_EQ(after.active[0].freed, 2);
  CHECK_EQ(after.inactive_split[0].current, 0);
  CHECK_EQ(after.num_ooms, 0);
  CHECK_EQ(after.num_device_alloc, 2);
  CHECK_EQ(after.num_device_free, 0);
  rig.allocator->empty_cache();
  CHECK_EQ(rig.allocator->statistics().num_device_free, 2);
  CHECK_EQ(rig.reserved(), 0);
}

inline void peaks_are_of_the_sum(const MakeRig& make) {
  Rig rig = make();
  const auto peak = [&](std::optional<Location> home) {
    return rig.allocator->statistics(home).allocated_bytes[0].peak;
  };
  constexpr auto kBytes = static_cast<std::int64_t>(12 * MiB);
  rig.allocator->free(rig.allocate(12 * MiB, Stream::default_of(0)));
  rig.allocator->free(rig.allocate(12 * MiB, Stream::default_of(1)));
  CHECK_EQ(peak(Location::device(0)), kBytes);
  CHECK_EQ(peak(Location::device(1)), kBytes);
  CHECK_EQ(peak(std::nullopt), kBytes); // they were never there at once
  Block* const one = rig.allocate(12 * MiB, Stream::default_of(0));
  Block* const two = rig.allocate(12 * MiB, Stream::default_of(1));
  CHECK_EQ(peak(std::nullopt), 2 * kBytes);
  rig.allocator->free(one);
  rig.allocator->free(two);
}

inline void statistics_reset_by_home(const MakeRig& make) {
  Rig rig = make();
  Block* const kept = rig.allocate(1024);
  rig.allocator->free(rig.allocate(4096));
  rig.allocator->reset_peak_statistics(kDevice);
  rig.allocator->reset_accumulated_statistics(kDevice);
  const Statistics here = rig.allocator->statistics(kDevice);
  CHECK_EQ(here.allocated_bytes[0].current, 1024);
  CHECK_EQ(here.allocated_bytes[0].peak, 1024);
  CHECK_EQ(here.allocated_bytes[0].allocated, 0);
  CHECK_EQ(here.active_bytes[0].peak, 1024);
  CHECK_EQ(here.active_bytes[0].freed, 0);
  CHECK_EQ(here.num_device_alloc, 0);
  const Statistics total = rig.allocator->statistics(); // is not reset with it
  CHECK_EQ(total.allocated_bytes[0].peak, 1024 + 4096);
  CHECK_EQ(total.allocated_bytes[0].allocated, 1024 + 4096);
  CHECK_EQ(total.num_device_alloc, 1);
  rig.allocator->free(kept);
  CHECK_EQ(rig.allocator->statistics(kDevice).allocated_bytes[0].freed, 1024);
  rig.check();
}

inline void the_snapshot_shows_every_byte(const MakeRig& make) {
  Rig rig = make();
  Block* const one = rig.allocate(1000);
  Block* const two = rig.allocate(12 * MiB);
  const auto snapshot = rig.allocator->snapshot();
  CHECK_EQ(snapshot.size(), std::size_t{2});
  std::size_t allocated = 0;
  for (const SegmentInfo& segment : snapshot) {
    std::uintptr_t next = segment.address;
    for (const BlockInfo& block : segment.blocks) {
      CHECK_EQ(block.address, next);
      next += block.bytes;
    }
    CHECK_EQ(next, segment.address + segment.bytes);
    CHECK(segment.home == kDevice);
    allocated += segment.allocated_bytes;
  }
  CHECK_EQ(allocated, rig.allocator->bytes(one) + rig.allocator->bytes(two));
  rig.allocator->free(one);
  rig.allocator->free(two);
}

// --- running short --------------------------------------------------------------------------------------------

inline void running_out_names_where_the_bytes_are(const MakeRig& make) {
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

inline void cached_segments_are_given_back_under_pressure(const MakeRig& make) {
  Rig rig = make();
  Block* const filler = rig.leave_room(64 * MiB);
  Block* const first = rig.allocate(40 * MiB);
  rig.allocator->free(first);
  Block* const second = rig.allocate(48 * MiB); // not beside the cached 40
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
  Block* const rest = rig.allocate(100, other); // not even a small segment fits: of the 4 MiB left
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
      CHECK(rig->allocator->is_valid()); // takes the lock
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
  CHECK_THROWS(OutOfMemory, rig.allocate(48 * MiB)); // the callback has nothing more to give
  CHECK_EQ(callback.asked, std::size_t{2});
  rig.allocator->set_pressure_callback(nullptr);
  CHECK_THROWS(OutOfMemory, rig.allocate(48 * MiB));
  CHECK_EQ(callback.asked, std::size_t{2});
  rig.allocator->free(block);
  rig.allocator->free(filler);
  rig.check();
}

inline void the_limit_is_never_overrun(const MakeRig& make) {
  Rig rig = make();
  if (!rig.managed) {
    return; // the limit is of managed memory
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

inline const std::vector<ContractCase>& contract_cases() {
#define TORCH_UVM_CASE(name) \
  ContractCase {             \
    #name, name              \
  }
  static const std::vector<ContractCase> cases{
      TORCH_UVM_CASE(zero_bytes_are_nothing),
      TORCH_UVM_CASE(blocks_are_aligned_and_apart),
      TORCH_UVM_CASE(unknown_homes_and_streams_are_refused),
      TORCH_UVM_CASE(the_host_is_a_home_of_managed_memory_only),
      TORCH_UVM_CASE(a_freed_block_is_reused),
      TORCH_UVM_CASE(the_best_fit_is_taken_lowest_address_first),
      TORCH_UVM_CASE(neighbours_coalesce_in_any_order),
      TORCH_UVM_CASE(homes_do_not_share_blocks),
      TORCH_UVM_CASE(another_stream_takes_a_block_before_a_new_segment_is_made),
      TORCH_UVM_CASE(blocks_that_other_streams_used_come_back),
      TORCH_UVM_CASE(a_moved_block_is_filed_where_it_is),
      TORCH_UVM_CASE(large_blocks_stay_whole_under_max_split),
      TORCH_UVM_CASE(addresses_find_their_block),
      TORCH_UVM_CASE(statistics_follow_what_happens),
      TORCH_UVM_CASE(peaks_are_of_the_sum),
      TORCH_UVM_CASE(statistics_reset_by_home),
      TORCH_UVM_CASE(the_snapshot_shows_every_byte),
      TORCH_UVM_CASE(running_out_names_where_the_bytes_are),
      TORCH_UVM_CASE(absurd_sizes_are_out_of_memory),
      TORCH_UVM_CASE(cached_segments_are_given_back_under_pressure),
      TORCH_UVM_CASE(free_neighbours_of_other_streams_are_merged_under_pressure),
      TORCH_UVM_CASE(pressure_callbacks_run_with_no_lock_held),
      TORCH_UVM_CASE(the_limit_is_never_overrun),
  };
#undef TORCH_UVM_CASE
  return cases;
}

} // namespace contract
