// Idle devices: steps that fit the budget.
#include <cstddef>
#include <random>

#include "residency_rig.h"

namespace {

using namespace residency;

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
  Rig rig;
  rig.engine.set_budget(0, kBudget, /*ceiling=*/kBudget);
  train(rig, 1, 600);
  CHECK(!rig.engine.is_awake());
  for (unsigned char number = 1; number <= 3; ++number) { // the rest of the budget
    create(rig, number);
  }
  CHECK_THROWS(OutOfMemory, create(rig, 4)); // an unwatched operator may have any of them
  CHECK(rig.engine.is_awake());
  CHECK(rig.engine.statistics().written_back.count == 0);
  rig.engine.note_between_operators(); // it has ended
  create(rig, 4);
  CHECK(rig.engine.statistics().written_back.count > 0);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
  rig.check_engine();
}

TEST(a_device_is_idle_only_if_what_is_created_meanwhile_fills_at_most_half_of_its_cap) {
  for (const int lasting : {1, 2}) { // 2 MiB each; the peak of a step is 6 of 8 MiB
    Rig rig;
    train(rig, lasting, 0);
    for (int step = 0; step < 400; ++step) {
      Storage& result = rig.make(9, 3 * kBytes - static_cast<std::size_t>(lasting) * kBytes);
      rig.run(5, {&result, rig.storages[0].get()}, false, [] {});
      rig.free(result);
      rig.storages.pop_back();
    }
    CHECK_EQ(rig.engine.is_awake(), lasting == 1);
  }
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

TEST(a_budget_set_while_idle_wakes_only_a_device_that_it_leaves_no_room) {
  Rig rig;
  train(rig, 2, 200);
  CHECK(!rig.engine.is_awake());
  rig.engine.set_budget(0, 2 * kBudget);
  CHECK(!rig.engine.is_awake());
  rig.engine.set_budget(0, 2 * kBytes);
  CHECK(rig.engine.is_awake());
  train(rig, 2, 3);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(2 * kBytes));
  rig.check_engine();
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
