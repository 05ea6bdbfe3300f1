// Fetches ahead of use: their share of the budget, and the operators that have priority over them.
#include "residency_rig.h"

using namespace residency;

namespace {

/// One step over eight storages: each operator reads two.
void read_in_turn(Rig& rig) {
  for (std::size_t index = 0; index < 8; ++index) {
    Storage& one = *rig.storages[index];
    Storage& other = *rig.storages[(index + 1) % 8];
    rig.run(30 + index, {&one, &other}, false, [&] {
      Rig::check(one);
      Rig::check(other);
    });
  }
}

} // namespace

TEST(a_running_operator_has_priority_over_fetches_ahead) {
  Rig rig;
  for (unsigned char number = 1; number <= 8; ++number) {
    rig.make(number);
  }
  for (int step = 0; step < 6; ++step) {
    read_in_turn(rig);
  }
  CHECK(std::ranges::any_of(rig.storages, [](const auto& storage) { return storage->record->fetching(); }));
  // This operator is not in the schedule, and needs the whole budget.
  std::vector<Storage*> used;
  for (const std::size_t index : {4, 5, 6, 7}) {
    used.push_back(rig.storages[index].get());
  }
  rig.run(99, used, false, [&] {
    for (const Storage* const storage : used) {
      CHECK(storage->record->points_at == Side::kDevice);
      Rig::check(*storage);
    }
  });
  CHECK(rig.engine.statistics().used_in_place.count == 0);
  CHECK(rig.engine.statistics().over_budget == 0);
  rig.check_engine();
  read_in_turn(rig);
}

TEST(an_unplanned_eviction_is_fetched_back_before_the_use) {
  Rig rig;
  for (unsigned char number = 1; number <= 3; ++number) {
    rig.make(number);
  }
  const auto run = [&](OperatorKey from, OperatorKey to) { // of twelve operators: four on each storage in turn
    for (OperatorKey key = from; key < to; ++key) {
      Storage& used = *rig.storages[key / 4];
      rig.run(40 + key, {&used}, false, [&] { Rig::check(used); });
    }
  };
  for (int step = 0; step < 6; ++step) {
    run(0, 12); // three of the budget's four blocks: no eviction
  }
  CHECK(rig.engine.statistics().plan_hits > 0);
  CHECK(rig.engine.statistics().written_back.count == 0);
  run(0, 4);
  Storage& last = *rig.storages[2];
  rig.free(rig.make(9, 3 * kBytes)); // a short allocation that is not in the schedule
  CHECK(last.record->device_block == nullptr);
  run(4, 8);
  CHECK(last.record->device_block != nullptr);
  run(8, 12);
  rig.check_engine();
}

TEST(a_storage_that_a_collective_uses_on_the_host_is_not_fetched_ahead) {
  Rig rig;
  for (unsigned char number = 1; number <= 3; ++number) {
    rig.make(number);
  }
  const auto run = [&](OperatorKey from, OperatorKey to) { // of twelve operators: four on each storage in turn
    for (OperatorKey key = from; key < to; ++key) {
      Storage& used = *rig.storages[key / 4];
      rig.run(40 + key, {&used}, false, [&] { Rig::check(used); });
    }
  };
  for (int step = 0; step < 6; ++step) {
    run(0, 12);
  }
  run(0, 4);
  Storage& last = *rig.storages[2];
  rig.free(rig.make(9, 3 * kBytes)); // evicts it
  CHECK(last.record->points_at == Side::kHost);
  last.record->collective = true; // a collective that found no room for it
  run(4, 8); // without the collective, it would be fetched before each of these
  CHECK(last.record->device_block == nullptr);
  Rig::write(last, 99); // the collective's write, which the engine does not see
  run(8, 12);
  CHECK(last.record->points_at == Side::kDevice);
  rig.check_engine();
}

/// The most bytes that are fetched ahead in a loop over `count` storages of `bytes`. A large temporary evicts
/// everything. When it is freed, there is room for all storages at once, long before their use.
std::size_t most_fetched_ahead(std::size_t bytes, std::size_t count) {
  Rig rig;
  for (std::size_t number = 1; number <= count; ++number) {
    rig.make(static_cast<unsigned char>(number), bytes);
  }
  std::size_t most = 0;
  const auto run = [&](OperatorKey key, Storage& used) {
    rig.run(key, {&used}, true, [&] {
      Rig::check(used);
      Rig::write(used, static_cast<unsigned char>(used.content + 1));
    });
    std::size_t ahead = 0;
    for (const auto& storage : rig.storages) {
      ahead += storage->record != nullptr && storage->record->fetching() ? storage->bytes : 0;
    }
    most = std::max(most, ahead);
    rig.check_engine();
  };
  for (int step = 0; step < 8; ++step) {
    rig.free(rig.make(99, 7 * MiB));
    for (OperatorKey key = 10; key < 20; ++key) {
      run(key, *rig.storages[0]);
    }
    for (std::size_t index = 1; index < count; ++index) {
      run(19 + index, *rig.storages[index]);
    }
  }
  CHECK(rig.engine.statistics().plan_hits > 0);
  return most;
}

TEST(fetches_ahead_take_at_most_a_share_of_the_budget) {
  CHECK_EQ(most_fetched_ahead(512 * KiB, 13), 5 * 512 * KiB); // a third of 8 MiB
}

TEST(two_large_storages_are_fetched_ahead_and_not_three) {
  CHECK_EQ(most_fetched_ahead(5 * MiB / 4, 5), 5 * MiB / 2);
}

/// Its operator fetches it, before there is room to do so ahead. Later there is room, and it has left as planned.
TEST(a_fetch_ahead_without_room_is_forgotten_once_an_operator_has_used_the_storage) {
  Rig rig;
  for (unsigned char number = 1; number <= 2; ++number) {
    rig.make(number);
  }
  const auto run = [&](OperatorKey from, OperatorKey to, std::size_t index) {
    for (OperatorKey key = from; key < to; ++key) {
      Storage& used = *rig.storages[index];
      rig.run(key, {&used}, false, [&] { Rig::check(used); });
      rig.check_engine();
    }
  };
  Storage& late = *rig.storages[1];
  for (int step = 0; step < 8; ++step) {
    rig.free(rig.make(99, 7 * MiB)); // both leave
    run(10, 20, 0);
    CHECK(step < 7 || late.record->fetching());
    run(20, 21, 1);
    run(21, 40, 0);
    CHECK(step < 7 || late.record->device_block == nullptr);
  }
  rig.free(rig.make(99, 7 * MiB));
  Storage& other = rig.make(98, 3 * kBytes); // not in the schedule
  run(10, 20, 0);
  CHECK(late.record->device_block == nullptr);
  run(20, 21, 1);
  rig.free(other);
  run(21, 40, 0);
  CHECK(late.record->device_block == nullptr);
}

TEST(fetches_for_another_step_do_not_block_those_of_this_one) {
  constexpr std::size_t kSmall = 512 * KiB;
  Rig rig;
  for (unsigned char number = 1; number <= 24; ++number) {
    rig.make(number, kSmall);
  }
  const auto run = [&](OperatorKey key, Storage& used) {
    rig.run(key, {&used}, true, [&] { Rig::check(used); });
    rig.check_engine();
  };
  // Interrupted while fetches of a third of the budget are under way for operators that never run.
  const auto step = [&](std::size_t first, bool whole) {
    rig.free(rig.make(99, 7 * MiB));
    for (OperatorKey key = 0; key < 10; ++key) {
      run(100 * first + key, *rig.storages[first]);
    }
    for (std::size_t index = 1; whole && index < 12; ++index) {
      run(100 * first + 10 + index, *rig.storages[first + index]);
    }
  };
  for (int turn = 0; turn < 8; ++turn) {
    step(0, true);
  }
  step(0, false);
  const auto fetching = [&](std::size_t first) {
    return std::count_if(rig.storages.begin() + static_cast<std::ptrdiff_t>(first),
                         rig.storages.begin() + static_cast<std::ptrdiff_t>(first + 12),
                         [](const auto& storage) { return storage->record->fetching(); });
  };
  CHECK_EQ(fetching(0), 5);
  for (int turn = 0; turn < 8; ++turn) {
    step(12, true);
  }
  step(12, false);
  CHECK_EQ(fetching(12), 5);
}

HARNESS_MAIN()
