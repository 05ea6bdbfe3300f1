// Idle devices: soft budgets without memory pressure, and steps that fit the budget.
#include <cstddef>
#include <random>

#include "residency_rig.h"

namespace {

using namespace residency;

TEST(a_soft_budget_is_idle_until_memory_is_short) {
  Rig rig(/*hard=*/false);
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number);
  }
  CHECK(!rig.engine.is_awake());
  CHECK(rig.adapter.woken == 0);
  rig.make(5);
  CHECK(rig.engine.is_awake());
  CHECK(rig.adapter.woken == 1);
  train(rig, 3, 300);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget)); // the excess has been released
}

/// A factory function. Its frame does not begin, because it has no operands.
void create(Rig& rig, unsigned char content) {
  Engine::Frame frame;
  rig.storages.push_back(std::make_unique<Storage>());
  Storage& made = *rig.storages.back();
  made.bytes = kBytes;
  made.block = rig.memory.allocate(kBytes, Location::device(0), kStream);
  made.ptr = static_cast<unsigned char*>(rig.memory.data(made.block));
  Rig::write(made, content);
  const Engine::Lock lock(rig.engine);
  if (rig.engine.watches(0)) {
    made.record = rig.engine.adopt(made.block, 0, &made);
    rig.engine.created(frame, made.record, rig.streams);
  }
  rig.engine.end(frame);
}

TEST(factory_functions_after_a_wake_up_may_be_nested_in_an_unwatched_operator) {
  Rig rig(/*hard=*/false);
  for (unsigned char number = 1; number <= 24; ++number) { // twice the budget
    create(rig, number);
  }
  CHECK(rig.engine.is_awake());
  CHECK(rig.engine.statistics().written_back.count == 0); // that operator may have any of them
  train(rig, 0, 1); // these are nested in nothing
  CHECK(rig.engine.statistics().written_back.count > 0);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
}

TEST(a_device_is_idle_while_steps_fit) {
  Rig rig;
  train(rig, 3, 200);
  CHECK(!rig.engine.is_awake());
  const std::int64_t seen = rig.engine.statistics().plan_hits;
  train(rig, 0, 10);
  CHECK(rig.engine.statistics().plan_hits == seen);

  train(rig, 1, 2); // more memory than ever before
  CHECK(rig.engine.is_awake());
  train(rig, 4, 6); // more than the budget holds
  CHECK(rig.adapter.woken == 1);
  CHECK(rig.engine.statistics().fetched.count > 0);
  CHECK(rig.engine.statistics().over_budget == 0);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));

  while (rig.storages.size() > 3) {
    rig.free(*rig.storages.back());
    rig.storages.pop_back();
  }
  train(rig, 0, 400);
  CHECK(!rig.engine.is_awake()); // the steps fit again
  rig.check_engine();
}

TEST(a_device_is_idle_while_steps_keep_only_small_blocks) {
  Rig rig;
  train(rig, 3, 1);
  std::vector<Block*> losses;
  for (int step = 0; step < 200; ++step) {
    losses.push_back(rig.memory.allocate(512, Location::device(0), kStream));
    train(rig, 0, 1);
  }
  CHECK(!rig.engine.is_awake());
  for (Block* const loss : losses) {
    rig.memory.free(loss);
  }
}

TEST(a_device_is_idle_without_steps_if_memory_does_not_rise) {
  Rig rig;
  train(rig, 3, 1);
  std::mt19937 random(1);
  int operators = 0;
  for (; rig.engine.is_awake() && operators < 40'000; ++operators) { // they never repeat
    rig.run(random(), {rig.storages[random() % 3].get()}, false, [] {});
  }
  CHECK(operators > 10'000 && operators < 20'000);
  CHECK(rig.engine.statistics().plan_hits == 0);
  rig.check_engine();
  rig.make(4);
  CHECK(rig.engine.is_awake()); // more memory than before
  train(rig, 0, 4);
  train(rig, 2, 3);
  CHECK(rig.engine.statistics().over_budget == 0);
}

TEST(a_device_is_not_idle_without_steps_if_storages_move) {
  Rig rig;
  train(rig, 6, 1); // more than the budget holds
  std::mt19937 random(1);
  for (int operators = 0; operators < 20'000; ++operators) {
    rig.run(random(), {rig.storages[random() % 6].get()}, true, [] {});
  }
  CHECK(rig.engine.is_awake());
  rig.check_engine();
}

TEST(a_device_is_idle_if_operators_use_no_storages_that_move) {
  Rig rig;
  int operators = 0;
  for (; rig.engine.is_awake() && operators < 40'000; ++operators) {
    rig.run(7, {}, false, [] {});
  }
  CHECK(operators > 10'000 && operators < 20'000);
  rig.engine.wake(0);
  for (operators = 0; rig.engine.is_awake() && operators < 60'000; ++operators) {
    rig.run(7, {}, false, [] {});
  }
  CHECK(operators > 30'000 && operators < 40'000); // twice as long as the first time
  train(rig, 6, 3);
  CHECK(rig.engine.is_awake());
  rig.check_engine();
}

TEST(a_soft_budget_after_a_hard_one_is_idle_once_everything_is_fetched) {
  Rig rig;
  train(rig, 6, 3); // some storages are on the host, others have a clean copy there
  CHECK(rig.engine.statistics().written_back.count > 0);
  rig.engine.set_budget(0, 2 * kBudget, false);
  CHECK(!rig.engine.is_awake());
  for (const auto& storage : rig.storages) {
    CHECK(storage->block != nullptr);
    Rig::check(*storage);
    Rig::write(*storage, static_cast<unsigned char>(storage->content + 7)); // the engine does not see this write
  }
  rig.engine.set_budget(0, kBudget, true);
  train(rig, 0, 3);

  rig.engine.set_budget(0, kBudget / 2, false); // too little for everything: the device stays active
  CHECK(rig.engine.is_awake());
  train(rig, 0, 3);
}

TEST(an_idle_device_has_all_storages_and_no_valid_host_copies) {
  std::size_t idle = 0;
  for (unsigned seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random() % bound); };
    Rig rig;
    for (unsigned char number = 1; number <= 40; ++number) { // ragged sizes, so that free memory is fragmented
      try {
        rig.make(number, (1 + below(12)) * 256 * KiB);
      } catch (const OutOfMemory&) {
        // Pinned or running storages leave no contiguous room.
      }
      if (below(3) == 0 && !rig.storages.empty()) {
        const std::size_t gone = below(rig.storages.size());
        rig.free(*rig.storages[gone]);
        rig.storages.erase(rig.storages.begin() + static_cast<std::ptrdiff_t>(gone));
      }
      while (rig.storages.size() > 7) {
        rig.free(*rig.storages.front());
        rig.storages.erase(rig.storages.begin());
      }
    }
    rig.engine.set_budget(0, kBudget + below(16) * 512 * KiB, /*hard=*/false);
    if (rig.engine.is_awake()) {
      continue;
    }
    ++idle;
    for (const auto& storage : rig.storages) {
      CHECK(storage->block != nullptr);
      {
        const Engine::Lock lock(rig.engine);
        if (storage->record != nullptr) {
          CHECK(rig.engine.pin(storage->record, kStream));
          rig.engine.unpin(storage->record);
        }
      }
      Rig::write(*storage, static_cast<unsigned char>(storage->content + 7)); // the engine does not see this write
    }
    rig.engine.set_budget(0, kBudget, /*hard=*/true);
    train(rig, 2, 3);
    for (const auto& storage : rig.storages) {
      rig.run(9, {storage.get()}, false, [&] { Rig::check(*storage); });
    }
  }
  CHECK(idle > 50);
}

TEST(unseen_writes_make_a_storage_dirty) {
  Rig rig;
  train(rig, 5, 2); // creates copies on the host
  while (rig.storages.size() > 3) {
    rig.free(*rig.storages.back());
    rig.storages.pop_back();
  }
  train(rig, 0, 400);
  CHECK(!rig.engine.is_awake());
  for (const auto& storage : rig.storages) {
    Rig::write(*storage, static_cast<unsigned char>(storage->content + 7));
  }
  train(rig, 5, 3);
  CHECK(rig.engine.is_awake());
}

TEST(nothing_is_evicted_while_unseen_operators_may_run) {
  Rig rig;
  train(rig, 3, 200);
  CHECK(!rig.engine.is_awake());
  unsigned char* const ptr = rig.storages[0]->ptr; // used by an operator that began before the device became active
  for (unsigned char number = 0; number < 3; ++number) {
    Block* const block = rig.memory.allocate(kBytes, Location::device(0), kStream);
    rig.engine.note_allocation(0);
    CHECK(rig.storages[0]->ptr == ptr);
    rig.storages.push_back(std::make_unique<Storage>());
    rig.storages.back()->block = block;
    rig.storages.back()->ptr = static_cast<unsigned char*>(rig.memory.data(block));
    Rig::write(*rig.storages.back(), number);
  }
  CHECK(rig.engine.is_awake());
  CHECK(rig.engine.may_run_unwatched());
  CHECK(rig.engine.statistics().over_budget > 0); // the engine could not wait
  train(rig, 0, 8);
  CHECK(!rig.engine.may_run_unwatched());
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
}

TEST(recording_or_capturing_activates_the_device) {
  Rig rig;
  train(rig, 3, 200);
  CHECK(!rig.engine.is_awake());
  rig.engine.wake(0);
  CHECK(rig.engine.is_awake());
  CHECK(rig.adapter.woken == 1);
  train(rig, 0, 400);
  CHECK(!rig.engine.is_awake());
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
}

} // namespace

HARNESS_MAIN()
