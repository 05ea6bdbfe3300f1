// Room for a request: blocks in its way are relocated, and frees by other threads are waited for.
#include <future>
#include <mutex>
#include <thread>

#include "residency_rig.h"

namespace {

using namespace residency;

TEST(a_block_in_the_way_of_a_large_request_is_relocated) {
  Rig rig;
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number);
  }
  rig.free(*rig.storages[1]);
  rig.free(*rig.storages[3]);
  Storage& large = rig.make(9, 2 * kBytes); // half of the budget is free, in two pieces
  CHECK(large.block != nullptr);
  const ResidencyStatistics figures = rig.engine.statistics();
  CHECK_EQ(figures.moved.count, 1);
  CHECK_EQ(figures.moved.bytes, static_cast<std::int64_t>(kBytes));
  CHECK_EQ(figures.written_back.count, 0);
  for (const int index : {0, 2, 4}) {
    Storage& storage = *rig.storages[static_cast<std::size_t>(index)];
    CHECK(storage.block != nullptr);
    rig.run(40, {&storage}, true, [&] {
      Rig::check(storage);
      Rig::write(storage, static_cast<unsigned char>(storage.content + 1));
    });
    Rig::check(storage);
  }
  rig.check_engine();
}

void check_among_small(Rig& rig, const std::vector<Block*>& blocks) {
  for (const SegmentInfo& segment : rig.memory.snapshot()) {
    for (Block* const block : blocks) {
      const auto at = reinterpret_cast<std::uintptr_t>(rig.memory.data(block));
      CHECK(segment.kind == PoolKind::kSmall || at < segment.address || at >= segment.address + segment.bytes);
    }
  }
}

/// In a large segment, a block that never moves would split what could be one range.
TEST(storages_that_move_take_no_place_among_small_ones_and_need_not_leave_it) {
  Rig rig;
  rig.engine.set_budget(0, 32 * MiB + 4 * kSlot);
  rig.make(1, 8 * MiB); // its segment leaves 2 MiB of the budget
  for (unsigned char number = 2; number <= 5; ++number) {
    rig.make(number, 512 * KiB); // would fill them
  }
  std::vector<Block*> small;
  for (int number = 0; number < 4; ++number) {
    small.push_back(rig.memory.allocate(128 * KiB, Location::device(0), kStream)); // too small to move
  }
  check_among_small(rig, small);
  CHECK_EQ(rig.engine.statistics().written_back.count, 0);
  for (const auto& storage : rig.storages) {
    rig.run(40, {storage.get()}, false, [&] { Rig::check(*storage); });
    CHECK(storage->block != nullptr);
  }
  for (Block* const block : small) {
    rig.memory.free(block);
  }
  rig.check_engine();
}

TEST(storages_that_move_leave_what_is_left_for_small_ones) {
  Rig rig;
  rig.engine.set_budget(0, 128 * MiB + 4 * kSlot);
  while (rig.engine.statistics().written_back.count == 0) { // until one has left for another
    rig.make(static_cast<unsigned char>(rig.storages.size() + 1));
  }
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(126 * MiB));
  std::vector<Block*> small;
  for (int number = 0; number < 16; ++number) {
    small.push_back(rig.memory.allocate(128 * KiB, Location::device(0), kStream)); // too small to move
  }
  check_among_small(rig, small);
  CHECK_EQ(rig.engine.statistics().written_back.count, 1);
  CHECK_EQ(rig.reserved(), static_cast<std::int64_t>(128 * MiB));
  for (Block* const block : small) {
    rig.memory.free(block);
  }
  rig.check_engine();
}

TEST(small_ones_that_find_no_place_among_small_ones_lie_together_at_the_beginning_of_a_segment) {
  Rig rig;
  rig.engine.set_budget(0, 32 * MiB + 4 * kSlot);
  for (unsigned char number = 1; number <= 12; ++number) { // more than the budget
    rig.make(number, 3 * MiB);
  }
  std::vector<Block*> small;
  while (small.size() < 16) { // of them are as many as a segment of small ones has room for
    small.push_back(rig.memory.allocate(128 * KiB, Location::device(0), kStream)); // too small to move
  }
  rig.free(*rig.storages[5]); // leaves room in the middle of a segment
  rig.storages.erase(rig.storages.begin() + 5);
  while (small.size() < 24) {
    small.push_back(rig.memory.allocate(128 * KiB, Location::device(0), kStream));
  }
  for (const SegmentInfo& segment : rig.memory.snapshot()) {
    for (Block* const block : small) {
      const auto at = reinterpret_cast<std::uintptr_t>(rig.memory.data(block));
      const bool inside = at >= segment.address && at < segment.address + segment.bytes;
      CHECK(!inside || segment.kind == PoolKind::kSmall || at - segment.address < 8 * 128 * KiB);
    }
  }
  for (const auto& storage : rig.storages) {
    rig.run(40, {storage.get()}, false, [&] { Rig::check(*storage); });
  }
  for (Block* const block : small) {
    rig.memory.free(block);
  }
  rig.check_engine();
}

/// A storage that the repeating steps do not use is evicted once, although it is large and dirty. The steps keep their
/// own storages.
TEST(unused_storages_are_evicted_before_those_of_each_step) {
  Rig rig;
  Storage& idle = rig.make(1);
  Storage& first = rig.make(2);
  Storage& second = rig.make(3);
  const auto step = [&] {
    for (Storage* const used : {&first, &second}) {
      rig.run(used == &first ? 10 : 11, {used}, false, [&] { Rig::check(*used); });
    }
  };
  for (int number = 0; number < 40; ++number) {
    step();
  }
  CHECK(idle.block != nullptr); // while there is room
  rig.engine.reset_statistics();
  for (int number = 0; number < 4; ++number) {
    rig.free(rig.make(9, 2 * kBytes)); // frees two blocks, neither of which is next to the idle storage
    step();
  }
  CHECK(idle.block == nullptr);
  CHECK_EQ(rig.engine.statistics().written_back.count, 1);
  CHECK_EQ(rig.engine.statistics().fetched.count, 0);
  Rig::check(idle);
  rig.check_engine();
}

/// Blocks that are too small to be moved stay at their address. They are placed at one end, even if other evictions
/// would cost less.
TEST(unmovable_small_blocks_are_placed_together) {
  Rig rig;
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number);
  }
  std::vector<Storage*> by_address;
  for (const auto& storage : rig.storages) {
    by_address.push_back(storage.get());
  }
  std::ranges::sort(by_address, {}, [](const Storage* storage) { return storage->ptr; });
  Storage& lowest = *by_address.front();
  // the lowest storage was used last and is dirty, so by cost it would be evicted last
  for (int step = 0; step < 4; ++step) {
    for (Storage* const storage : {by_address[2], by_address[3], by_address[1], &lowest}) {
      rig.run(10, {storage}, storage == &lowest, [&] {
        if (storage == &lowest) {
          Rig::write(lowest, static_cast<unsigned char>(lowest.content + 1));
        }
      });
    }
  }
  const unsigned char* const where = lowest.ptr;
  std::vector<Block*> small;
  for (int number = 0; number < 20; ++number) {
    small.push_back(rig.memory.allocate(64 * KiB, Location::device(0), kStream));
    const auto* const ptr = static_cast<const unsigned char*>(rig.memory.data(small.back()));
    CHECK(ptr >= where && ptr < where + kBytes);
  }
  CHECK(lowest.block == nullptr);
  for (const int other : {1, 2, 3}) {
    CHECK(by_address[static_cast<std::size_t>(other)]->block != nullptr);
  }
  Rig::check(lowest);
  for (Block* const block : small) {
    rig.memory.free(block);
  }
  rig.check_engine();
}

/// A one-time signal to a thread that waits for it.
class Signal {
 public:
  void set() {
    std::call_once(once_, [this] { promise_.set_value(); });
  }
  void wait() {
    future_.wait();
  }

 private:
  std::promise<void> promise_;
  std::future<void> future_ = promise_.get_future();
  std::once_flag once_;
};

/// Fills the budget with four storages, of which only the second may be evicted.
void fill(Rig& rig) {
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number);
  }
  const Engine::Lock lock(rig.engine);
  for (const int index : {0, 2, 3}) {
    rig.engine.pin(rig.storages[static_cast<std::size_t>(index)]->record, kStream);
  }
}

TEST(a_budget_accounts_for_the_drivers_rounding) {
  struct Stepping : RecordingRuntime {
    DeviceProperties device_properties(int device) const override {
      DeviceProperties properties = RecordingRuntime::device_properties(device);
      properties.managed_step = 128 * MiB;
      return properties;
    }
  } runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  Adapter adapter{memory};
  const std::unique_ptr<Engine> owned_engine = std::make_unique<Engine>(runtime, memory, adapter);
  Engine& engine = *owned_engine;
  engine.set_staging(0);
  const auto cap_of = [&](std::size_t budget) {
    engine.set_budget(0, budget);
    return memory.cap(0);
  };
  CHECK_EQ(*cap_of(1286 * MiB), 1280 * MiB); // the driver would take 1408 MiB
  CHECK_EQ(*cap_of(1404 * MiB), 1404 * MiB); // the driver would take hardly more
  CHECK_EQ(*cap_of(1280 * MiB), 1280 * MiB);
  CHECK_EQ(*cap_of(740 * MiB), 740 * MiB); // otherwise a seventh of the budget would be unused
  CHECK_EQ(*cap_of(100 * MiB), 100 * MiB);
  memory.set_pressure_callback(nullptr);
}

TEST(a_failed_eviction_is_retried_if_there_is_no_other) {
  Rig rig;
  fill(rig);
  Storage& other = *rig.storages[1];
  other.gone = true; // for example, a second tensor owns its bytes
  CHECK_THROWS(OutOfMemory, rig.make(9));
  other.gone = false;
  CHECK(rig.make(9).block != nullptr);
  CHECK(other.block == nullptr);
  Rig::check(other);
  rig.check_engine();
}

TEST(a_request_waits_for_a_free_by_another_thread) {
  Rig rig;
  fill(rig);
  Storage& going = *rig.storages[1];
  going.going = true;
  Signal noticed;
  rig.adapter.on_going = [&] { noticed.set(); };
  std::thread owner([&] {
    noticed.wait();
    rig.free(going);
  });
  bool served = true;
  try {
    Rig::check(rig.make(9));
  } catch (const OutOfMemory&) {
    served = false;
  }
  noticed.set();
  owner.join();
  CHECK(served);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
  rig.check_engine();
}

/// An operator that needs more than a budget exceeds it. One that needs exactly as much does so, too, if something
/// small lies beside it: otherwise it would fail where it runs within a smaller budget.
TEST(a_request_for_all_of_a_hard_budget_is_served_beside_little) {
  const auto make = [](Rig& rig, std::size_t bytes) {
    return rig.memory.allocate(bytes, Location::device(0), kStream);
  };
  for (const std::size_t share : {64, 32}) {
    Rig rig;
    const std::size_t cap = *rig.memory.cap(0);
    Block* const little = make(rig, cap / share);
    Block* const all = make(rig, cap);
    CHECK_EQ(rig.engine.statistics().over_budget, 1);
    rig.memory.free(all);
    rig.memory.free(little);
  }
  Rig rig;
  const std::size_t cap = *rig.memory.cap(0);
  Block* const more = make(rig, cap / 16);
  CHECK_THROWS(OutOfMemory, make(rig, cap - cap / 32));
  rig.memory.free(more);
}

/// A memory-pressure callback that signals each call and forwards it to the engine's.
class Asked final : public PressureCallback {
 public:
  Asked(Engine& engine, Signal& signal) : engine_(engine), signal_(signal) {}
  bool make_room(std::size_t bytes, Location home, Stream stream) override {
    signal_.set();
    return engine_.make_room(bytes, home, stream);
  }
  bool may_exceed(std::size_t bytes, Location home) override {
    return engine_.may_exceed(bytes, home);
  }

 private:
  Engine& engine_;
  Signal& signal_;
};

TEST(a_request_waits_for_the_block_of_a_destroyed_storage) {
  for (int round = 0; round < 100; ++round) {
    Rig rig;
    fill(rig);
    Storage& dead = *rig.storages[1];
    rig.engine.destroyed(dead.record);
    dead.record = nullptr;
    Signal asked;
    Asked callback(rig.engine, asked);
    rig.memory.set_pressure_callback(&callback);
    std::thread owner([&, block = std::exchange(dead.block, nullptr)] {
      asked.wait();
      rig.memory.free(block);
      rig.engine.freed();
    });
    bool served = true;
    try {
      Rig::check(rig.make(9));
    } catch (const OutOfMemory&) {
      served = false;
    }
    asked.set();
    owner.join();
    CHECK(served);
  }
}

TEST(the_wait_for_a_free_by_another_thread_is_bounded) {
  Rig rig;
  fill(rig);
  rig.storages[1]->going = true;
  CHECK_THROWS(OutOfMemory, rig.make(9));
  rig.free(*rig.storages[1]);
  Rig::check(rig.make(9));
}

} // namespace

HARNESS_MAIN()
