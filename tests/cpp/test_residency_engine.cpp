// The engine over the test's own storages: bytes survive evictions, the budget holds, pinned storages do not move, and
// budgets change.
#include "residency_rig.h"

using namespace residency;

namespace {

/// Reads all storages but the first: more than the budget holds.
void read_the_rest(Rig& rig) {
  for (std::size_t index = 1; index < rig.storages.size(); ++index) {
    rig.run(40 + index, {rig.storages[index].get()}, false, [&] { Rig::check(*rig.storages[index]); });
  }
}

} // namespace

TEST(evicted_storages_keep_their_bytes) {
  Rig rig;
  train(rig, 8, 6);
  CHECK(rig.storages.size() == 8);
  const ResidencyStatistics figures = rig.engine.statistics();
  CHECK(figures.written_back.count > 0);
  CHECK(figures.fetched.count > 0);
  CHECK(figures.failures == 0);
  CHECK(figures.over_budget == 0);
  CHECK(figures.peak_device_bytes.at(0) <= static_cast<std::int64_t>(kBudget));
  CHECK(figures.plan_hits > 0);
}

TEST(a_storage_that_is_only_read_is_dropped_without_a_copy) {
  Rig rig;
  for (unsigned char number = 1; number <= 8; ++number) {
    rig.make(number);
  }
  const std::int64_t before = rig.engine.statistics().written_back.count;
  for (int step = 0; step < 4; ++step) {
    for (std::size_t index = 0; index < 8; ++index) {
      rig.run(20 + index, {rig.storages[index].get()}, false, [&] { Rig::check(*rig.storages[index]); });
    }
  }
  // A storage without a host copy is written back once; no storage is written back twice.
  CHECK(rig.engine.statistics().written_back.count <= before + 4);
  CHECK(rig.engine.statistics().dropped_clean.count > 0);
}

TEST(writes_of_a_former_sharer_survive_the_next_eviction) {
  Rig rig;
  Storage& first = rig.make(1);
  for (unsigned char number = 2; number <= 8; ++number) {
    rig.make(number);
  }
  // It is on the device, and its host copy is valid.
  rig.run(20, {&first}, false, [&] { Rig::check(first); });
  CHECK(first.block != nullptr && first.record->host_valid);
  first.shared = first.was_shared = true;
  std::memset(first.ptr, first.content = 99, first.bytes); // by an operation that the engine does not see
  read_the_rest(rig);
  CHECK(first.block != nullptr);
  first.shared = false;
  std::vector<Storage*> rest; // these fill the whole budget
  for (const std::size_t index : {2, 3, 4, 5}) {
    rest.push_back(rig.storages[index].get());
  }
  rig.run(60, rest, false, [] {});
  CHECK(first.block == nullptr);
  Rig::check(first);
  rig.check_engine();
}

TEST(a_write_of_a_nested_operator_is_not_lost) {
  Rig rig;
  train(rig, 8, 2);
  for (int round = 0; round < 3; ++round) {
    for (const auto& storage : rig.storages) {
      Engine::Frame frame;
      {
        const Engine::Lock lock(rig.engine);
        rig.engine.begin(frame, {30, "outer", false, false, false}, {}, rig.streams);
        const Engine::Operand operand{storage->record, true};
        rig.engine.begin_nested(frame, {&operand, 1}, rig.streams);
      }
      Rig::check(*storage);
      Rig::write(*storage, static_cast<unsigned char>(storage->content + 3));
      const Engine::Lock lock(rig.engine);
      rig.engine.end(frame);
    }
  }
  train(rig, 0, 2);
}

TEST(a_materialised_storage_counts_as_written) {
  Rig rig;
  train(rig, 8, 2);
  for (const auto& storage : rig.storages) {
    rig.engine.materialise(storage->record, kStream);
    Rig::check(*storage);
    Rig::write(*storage, static_cast<unsigned char>(storage->content + 5)); // the engine does not see this write
  }
  train(rig, 0, 3);
}

TEST(pinned_storages_and_those_in_foreign_use_stay) {
  Rig rig;
  Storage& held = rig.make(1);
  Storage& labelled = rig.make(2);
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.pin(held.record, kStream);
  }
  labelled.gone = true;
  const unsigned char* const addresses[] = {held.ptr, labelled.ptr};
  train(rig, 6, 3);
  CHECK(held.ptr == addresses[0]);
  CHECK(labelled.ptr == addresses[1]);
  const Engine::Lock lock(rig.engine);
  rig.engine.unpin(held.record);
}

/// A budget below the current use takes effect as soon as no unseen operator can be using the storages.
TEST(a_budget_below_the_current_use_takes_effect) {
  Rig rig;
  rig.engine.set_budget(0, std::nullopt);
  for (unsigned char number = 1; number <= 8; ++number) {
    rig.make(number);
  }
  CHECK(rig.reserved() > static_cast<std::int64_t>(kBudget));
  rig.engine.set_budget(0, kBudget);
  {
    const Engine::Lock lock(rig.engine);
    for (const auto& storage : rig.storages) {
      storage->record = rig.engine.adopt(storage->block, 0, storage.get());
    }
  }
  Storage& used = *rig.storages.front();
  for (int number = 0; number < 600; ++number) {
    rig.run(10, {&used}, false, [&] { Rig::check(used); });
  }
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
  for (const auto& storage : rig.storages) {
    Rig::check(*storage);
  }
  rig.check_engine();
}

TEST(lifting_a_budget_fetches_everything) {
  Rig rig;
  train(rig, 8, 2);
  rig.engine.set_budget(0, std::nullopt);
  for (const auto& storage : rig.storages) {
    CHECK(storage->block != nullptr);
    Rig::check(*storage);
  }
  CHECK(!rig.engine.is_awake());
}

TEST(steps_do_not_accumulate_events) {
  Rig rig;
  train(rig, 8, 3);
  const std::size_t objects = rig.runtime.live_objects();
  train(rig, 0, 20);
  rig.engine.statistics(); // collects the events of timed copies
  const std::size_t copies = static_cast<std::size_t>(rig.engine.statistics().written_back.count);
  CHECK(copies > 50);
  CHECK(rig.runtime.live_objects() < objects + 10);
}

HARNESS_MAIN()
