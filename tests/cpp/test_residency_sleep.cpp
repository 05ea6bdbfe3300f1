// Who is not watched: soft budgets that nothing has run against, and steps that fit.
#include "residency_rig.h"

namespace {

using namespace residency;

TEST(a_soft_budget_sleeps_until_memory_is_short) {
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
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget)); // what was taken beyond it has been given back
}

TEST(steps_that_fit_are_not_watched) {
  Rig rig;
  train(rig, 3, 200);
  CHECK(!rig.engine.is_awake());
  const std::int64_t seen = rig.engine.statistics().plan_hits;
  train(rig, 0, 10);
  CHECK(rig.engine.statistics().plan_hits == seen);

  train(rig, 1, 2); // more than there ever was
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
  CHECK(!rig.engine.is_awake()); // they fit again
  rig.check_engine();
}

TEST(steps_that_keep_a_little_each_are_quiet) {
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

TEST(a_soft_budget_after_a_hard_one_sleeps_when_everything_is_back) {
  Rig rig;
  train(rig, 6, 3); // some are on the host, others have clean copies there
  CHECK(rig.engine.statistics().written_back.count > 0);
  rig.engine.set_budget(0, 2 * kBudget, false);
  CHECK(!rig.engine.is_awake());
  for (const auto& storage : rig.storages) {
    CHECK(storage->block != nullptr);
    Rig::check(*storage);
    Rig::write(*storage, static_cast<unsigned char>(storage->content + 7)); // unseen
  }
  rig.engine.set_budget(0, kBudget, true);
  train(rig, 0, 3);

  rig.engine.set_budget(0, kBudget / 2, false); // too little for everything: it stays awake
  CHECK(rig.engine.is_awake());
  train(rig, 0, 3);
}

TEST(what_was_written_unseen_is_not_taken_for_clean) {
  Rig rig;
  train(rig, 5, 2); // copies on the host come about
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

TEST(nothing_is_given_up_while_unseen_operators_may_run) {
  Rig rig;
  train(rig, 3, 200);
  CHECK(!rig.engine.is_awake());
  unsigned char* const ptr = rig.storages[0]->ptr; // in the hands of an operator that began before anybody watched
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
  CHECK(rig.engine.statistics().over_budget > 0); // it could not wait
  train(rig, 0, 8);
  CHECK(!rig.engine.may_run_unwatched());
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
}

TEST(who_records_or_captures_wakes_the_engine) {
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
