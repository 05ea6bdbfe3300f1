// The log of an observed allocator: rows in RMM's format, one for each allocation, free and failure, in an order that
// is possible.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "log_rig.h"

using namespace logs;

TEST(rows_have_rmms_format) {
  const ScratchFile file;
  AllocationLog log(file.path());
  log.allocated(reinterpret_cast<void*>(0x7f0c3a000000), 1048576, kStream);
  log.freed(reinterpret_cast<void*>(0x7f0c3a000000), 1048576, kStream);
  log.refused(68719476736, {0, reinterpret_cast<void*>(0x2)});
  const AllocationLogEnd end = log.close();
  CHECK_EQ(end.error, "");
  CHECK_EQ(end.rows, std::uint64_t{3});
  CHECK_EQ(end.lost, std::uint64_t{0});
  const std::vector<Row> rows = rows_of(file);
  CHECK_EQ(rows.size(), std::size_t{3});
  CHECK_EQ(rows[0].thread, std::to_string(::gettid()));
  CHECK_EQ(rows[0].action, "allocate");
  CHECK_EQ(rows[0].pointer, "0x7f0c3a000000");
  CHECK_EQ(rows[0].bytes, std::size_t{1048576});
  CHECK_EQ(rows[0].stream, "0");
  CHECK_EQ(rows[1].action, "free");
  CHECK_EQ(rows[2].action, "allocate failure");
  CHECK_EQ(rows[2].pointer, "(nil)");
  CHECK_EQ(rows[2].stream, "0x2");
  log.freed(nullptr, 1, kStream); // logging has stopped: no row
  CHECK_EQ(log.close().rows, std::uint64_t{3});
}

TEST(a_logged_stream_names_its_device) {
  const Stream streams[] = {Stream::host(),
                            kStream,
                            Stream::default_of(3),
                            {0, reinterpret_cast<void*>(0x7fffdeadbee0)},
                            {7, reinterpret_cast<void*>(0x10)}};
  std::set<std::uint64_t> seen;
  for (const Stream stream : streams) {
    seen.insert(logged_stream(stream));
    CHECK(stream_from_log(logged_stream(stream)) == stream);
  }
  CHECK_EQ(seen.size(), std::size(streams));
  CHECK_EQ(logged_stream({0, reinterpret_cast<void*>(0x55550000)}), std::uint64_t{0x55550000}); // RMM's representation
  CHECK_THROWS(InvalidArgument, stream_from_log(0x8000000000000000));
  CHECK_THROWS(InvalidArgument, stream_from_log(0xffff000000000001));
}

TEST(an_observed_allocator_logs_every_allocation_and_free) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  Block* const before = rig.memory.allocate(100, kDevice, kStream);
  rig.memory.set_observer(&log);
  Block* const first = rig.memory.allocate(1000, kDevice, kStream);
  Block* const host = rig.memory.allocate(3000, Location::host(), Stream::host());
  const std::string address = text_of(rig.memory.data(first));
  rig.memory.free(first);
  Block* const again = rig.memory.allocate(1000, kDevice, kStream);
  Block* const tried = rig.memory.try_allocate(500, kDevice, kStream);
  CHECK_EQ(rig.memory.allocate(0, kDevice, kStream), static_cast<Block*>(nullptr));
  rig.runtime.set_limit(rig.runtime.managed_bytes());
  CHECK_THROWS(OutOfMemory, rig.memory.allocate(64 * MiB, kDevice, kStream));
  CHECK_THROWS(OutOfMemory, rig.memory.allocate(~std::size_t{0}, kDevice, kStream));
  CHECK_EQ(rig.memory.try_allocate(64 * MiB, kDevice, kStream),
           static_cast<Block*>(nullptr)); // a refused try_allocate is not a failure: no row
  const Event event = rig.runtime.create_event(0, false);
  rig.runtime.record_event(event, kStream);
  rig.memory.free_after(again, event, kStream);
  rig.memory.free(host);
  rig.memory.free(before);
  rig.memory.set_observer(nullptr);
  rig.memory.free(tried);
  CHECK_EQ(log.close().error, "");

  const std::vector<Row> rows = rows_of(file);
  const std::vector<std::pair<std::string, std::size_t>> expected = {{"allocate", 1000},
                                                                     {"allocate", 3000},
                                                                     {"free", 1000},
                                                                     {"allocate", 1000},
                                                                     {"allocate", 500},
                                                                     {"allocate failure", 64 * MiB},
                                                                     {"allocate failure", ~std::size_t{0}},
                                                                     {"free", 1000},
                                                                     {"free", 3000},
                                                                     {"free", 100}};
  CHECK_EQ(rows.size(), expected.size());
  for (std::size_t at = 0; at < rows.size(); ++at) {
    CHECK_EQ(rows[at].action, expected[at].first);
    CHECK_EQ(rows[at].bytes, expected[at].second);
  }
  CHECK_EQ(rows[0].pointer, address);
  CHECK_EQ(rows[3].pointer, address); // the block was reused: the row of its free precedes the row of the allocation
  CHECK_EQ(rows[1].stream, "0xffff000000000000");
}

TEST(a_relocated_block_is_logged_as_a_free_and_an_allocation) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  rig.memory.set_observer(&log);
  // A segment under a cap with more than 10 MiB free, but not contiguously.
  rig.memory.set_cap(0, 32 * MiB);
  std::vector<Block*> blocks;
  for (int number = 0; number < 16; ++number) {
    blocks.push_back(rig.memory.allocate(2 * MiB, kDevice, kStream));
    rig.memory.set_tag(blocks.back(), &blocks);
  }
  for (const std::size_t number : {0, 2, 4, 6, 8, 10}) {
    rig.memory.free(blocks[number]);
    blocks[number] = nullptr;
  }
  const auto moves = rig.memory.reserve_moves(
      8 * MiB, 0, kStream, [](void*, std::size_t bytes) { return double(bytes); }, [](void*) { return true; });
  CHECK(!moves.empty());
  for (const CachingManagedAllocator::Move& move : moves) {
    if (&move == &moves.front()) {
      rig.memory.roll_back(move);
    } else {
      std::replace(blocks.begin(), blocks.end(), move.from, move.to);
      rig.memory.commit(move);
    }
  }
  for (Block* const block : blocks) {
    rig.memory.free(block);
  }
  rig.memory.set_observer(nullptr);
  CHECK_EQ(log.close().error, "");
  const std::vector<Row> rows = rows_of(file);
  CHECK(rows.size() > 2 * 16);
  CHECK(replayed(rows).empty());
  CHECK_EQ(rig.memory.statistics().allocation[0].current, 0);
}

TEST(rows_of_several_threads_are_in_a_possible_order) {
  const ScratchFile file;
  Rig rig;
  AllocationLog log(file.path());
  rig.memory.set_observer(&log);
  std::vector<std::thread> threads;
  constexpr int kTurns = 30000; // more rows than the log buffers in memory
  for (int number = 0; number < 4; ++number) {
    threads.emplace_back([&, number] {
      std::vector<Block*> mine(8, nullptr);
      for (int turn = 0; turn < kTurns; ++turn) {
        Block*& place = mine[static_cast<std::size_t>(turn * 5 % 8)];
        rig.memory.free(place);
        place = rig.memory.allocate(static_cast<std::size_t>(1 + (turn * 37 + number) % 5000), kDevice, kStream);
      }
      for (Block* const block : mine) {
        rig.memory.free(block);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  rig.memory.set_observer(nullptr);
  const AllocationLogEnd end = log.close();
  CHECK_EQ(end.error, "");
  CHECK_EQ(end.rows, std::uint64_t{2 * 4 * kTurns});
  CHECK(end.rows > 2 * AllocationLog::kBlockRows);
  const std::vector<std::string> lines = file.lines();
  CHECK_EQ(lines.size(), end.rows + 1);
  std::set<std::string> numbers, live;
  for (std::size_t at = 1; at < lines.size(); ++at) { // without rows_of, which is slow
    std::istringstream line(lines[at]);
    std::string thread, time, action, pointer;
    std::getline(line, thread, ',');
    std::getline(line, time, ',');
    std::getline(line, action, ',');
    std::getline(line, pointer, ',');
    numbers.insert(thread);
    CHECK(action == "allocate" ? live.insert(pointer).second : live.erase(pointer) == 1);
  }
  CHECK(live.empty());
  CHECK_EQ(numbers.size(), std::size_t{4});
}

HARNESS_MAIN()
