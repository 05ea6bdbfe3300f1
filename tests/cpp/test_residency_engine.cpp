// The engine over storages of a test's own: right bytes, within the budget, whatever call of the runtime fails.
#include "residency_rig.h"

namespace {

using namespace residency;

TEST(storages_beyond_the_budget_keep_their_bytes) {
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

TEST(what_is_only_read_is_dropped_without_a_copy) {
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
  // Those that were still on the device only are written once, and none twice.
  CHECK(rig.engine.statistics().written_back.count <= before + 4);
  CHECK(rig.engine.statistics().dropped_clean.count > 0);
}

/// All but the first storage, more than the budget holds.
void read_the_rest(Rig& rig) {
  for (std::size_t index = 1; index < rig.storages.size(); ++index) {
    rig.run(40 + index, {rig.storages[index].get()}, false, [&] { Rig::check(*rig.storages[index]); });
  }
}

TEST(what_others_have_written_leaves_as_it_is_when_they_are_gone) {
  Rig rig;
  Storage& first = rig.make(1);
  for (unsigned char number = 2; number <= 8; ++number) {
    rig.make(number);
  }
  // It is on the device, and what was copied from it before is a copy of all its bytes.
  rig.run(20, {&first}, false, [&] { Rig::check(first); });
  CHECK(first.block != nullptr && first.record->host_valid);
  first.shared = first.was_shared = true;
  std::memset(first.ptr, first.content = 99, first.bytes); // by no operator that the engine has seen
  read_the_rest(rig);
  CHECK(first.block != nullptr);
  first.shared = false;
  std::vector<Storage*> rest; // all of the budget
  for (const std::size_t index : {2, 3, 4, 5}) {
    rest.push_back(rig.storages[index].get());
  }
  rig.run(60, rest, false, [] {});
  CHECK(first.block == nullptr);
  Rig::check(first);
  rig.check_engine();
}

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

TEST(what_is_fetched_ahead_gives_way_to_an_operator_that_runs) {
  Rig rig;
  for (unsigned char number = 1; number <= 8; ++number) {
    rig.make(number);
  }
  for (int step = 0; step < 6; ++step) {
    read_in_turn(rig);
  }
  CHECK(std::ranges::any_of(rig.storages, [](const auto& storage) { return storage->record->fetching(); }));
  // Nobody has foreseen this one, which takes all of the budget.
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

TEST(what_left_though_the_plan_counts_on_it_is_fetched_before_its_use) {
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
    run(0, 12); // three of four blocks: nothing leaves
  }
  CHECK(rig.engine.statistics().plan_hits > 0);
  CHECK(rig.engine.statistics().written_back.count == 0);
  run(0, 4);
  Storage& last = *rig.storages[2];
  rig.free(rig.make(9, 3 * kBytes)); // a moment's need, beside the plan
  CHECK(last.record->device_block == nullptr);
  run(4, 8);
  CHECK(last.record->device_block != nullptr);
  run(8, 12);
  rig.check_engine();
}

TEST(what_a_collective_uses_on_the_host_is_not_fetched_ahead) {
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
  rig.free(rig.make(9, 3 * kBytes)); // drives it out
  CHECK(last.record->points_at == Side::kHost);
  last.record->collective = true; // one for which there was no room
  run(4, 8); // before each of these it would be fetched
  CHECK(last.record->device_block == nullptr);
  Rig::write(last, 99); // which is what the collective does, unseen
  run(8, 12);
  CHECK(last.record->points_at == Side::kDevice);
  rig.check_engine();
}

TEST(no_more_than_a_share_of_a_budget_is_fetched_ahead) {
  // A large temporary drives all out. When it has gone there is room for all of them at once, long before their use.
  constexpr std::size_t kSmall = 512 * KiB;
  Rig rig;
  for (unsigned char number = 1; number <= 13; ++number) {
    rig.make(number, kSmall);
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
    for (OperatorKey key = 20; key < 32; ++key) {
      run(key, *rig.storages[key - 19]);
    }
  }
  CHECK_EQ(most, (kBudget - 4 * kSlot) / 4);
  CHECK(rig.engine.statistics().plan_hits > 0);
}

TEST(what_was_fetched_for_another_step_does_not_keep_this_one_from_fetching) {
  constexpr std::size_t kSmall = 512 * KiB;
  Rig rig;
  for (unsigned char number = 1; number <= 24; ++number) {
    rig.make(number, kSmall);
  }
  const auto run = [&](OperatorKey key, Storage& used) {
    rig.run(key, {&used}, true, [&] { Rig::check(used); });
    rig.check_engine();
  };
  // Cut off where a quarter of the budget is on its way for operators that never come.
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
  CHECK_EQ(fetching(0), 4);
  for (int turn = 0; turn < 8; ++turn) {
    step(12, true);
  }
  step(12, false);
  CHECK_EQ(fetching(12), 4);
}

TEST(a_write_in_an_operator_within_another_is_not_lost) {
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

TEST(a_settled_storage_counts_as_written) {
  Rig rig;
  train(rig, 8, 2);
  for (const auto& storage : rig.storages) {
    rig.engine.materialise(storage->record);
    Rig::check(*storage);
    Rig::write(*storage, static_cast<unsigned char>(storage->content + 5)); // nobody sees it
  }
  train(rig, 0, 3);
}

TEST(what_is_held_or_somebody_elses_stays) {
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

/// Where there is more than the budget before there is one, it is kept to as soon as nobody can be using it unseen.
TEST(a_budget_over_what_is_there_already_is_kept_to) {
  Rig rig;
  rig.engine.set_budget(0, std::nullopt, false);
  for (unsigned char number = 1; number <= 8; ++number) {
    rig.make(number);
  }
  CHECK(rig.reserved() > static_cast<std::int64_t>(kBudget));
  rig.engine.set_budget(0, kBudget, true);
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

TEST(a_budget_that_is_lifted_brings_everything_back) {
  Rig rig;
  train(rig, 8, 2);
  rig.engine.set_budget(0, std::nullopt, false);
  for (const auto& storage : rig.storages) {
    CHECK(storage->block != nullptr);
    Rig::check(*storage);
  }
  CHECK(!rig.engine.is_awake());
}

/// Sizes that leave gaps: what is large comes and goes among what stays.
void train_ragged(Rig& rig, int steps) {
  const std::size_t sizes[] = {kBytes / 2, kBytes, kBytes / 2, kBytes, 3 * kBytes / 2, kBytes / 2};
  for (std::size_t number = 0; number < std::size(sizes); ++number) {
    try {
      rig.make(static_cast<unsigned char>(number + 1), sizes[number]);
    } catch (const OutOfMemory&) {
    }
  }
  const std::size_t count = rig.storages.size();
  for (int step = 0; step < steps; ++step) {
    for (std::size_t index = 0; index < count; ++index) {
      Storage& written = *rig.storages[index];
      rig.run(50 + index, {&written}, true, [&] {
        Rig::check(written);
        Rig::write(written, static_cast<unsigned char>(written.content + 1));
      });
      try {
        rig.free(rig.make(100, kBytes + kBytes / 2 * (index % 3)));
      } catch (const OutOfMemory&) {
      }
      rig.storages.erase(rig.storages.begin() + static_cast<std::ptrdiff_t>(count), rig.storages.end());
      rig.check_engine();
    }
  }
  for (std::size_t index = 0; index < count; ++index) {
    rig.run(60, {rig.storages[index].get()}, false, [&] { Rig::check(*rig.storages[index]); });
  }
}

TEST(ragged_sizes_keep_their_bytes_whatever_call_fails) {
  std::int64_t moved = 0;
  bool reached = true;
  for (std::size_t nth = 1; reached; nth += kEvery) {
    Rig rig;
    rig.runtime.clear_calls();
    rig.runtime.fail("*", nth);
    train_ragged(rig, 3);
    reached = false;
    for (const RecordedCall& call : rig.runtime.calls()) {
      reached = reached || call.failed;
    }
    rig.runtime.clear_failures();
    moved += rig.engine.statistics().moved.count;
    CHECK(reached || rig.engine.statistics().over_budget == 0);
  }
  CHECK(moved > 100);
}

TEST(any_call_of_the_runtime_may_fail_once) {
  int failed = 0;
  for (std::size_t nth = 1;; nth += kEvery) {
    Rig rig;
    rig.runtime.clear_calls();
    rig.runtime.fail("*", nth);
    train(rig, 7, 3);
    bool reached = false;
    for (const RecordedCall& call : rig.runtime.calls()) {
      reached = reached || call.failed;
    }
    rig.runtime.clear_failures();
    train(rig, 0, 2); // and it goes on
    rig.check_engine();
    if (!reached) {
      break;
    }
    ++failed;
  }
  CHECK(failed > 100);
}

TEST(steps_do_not_make_ever_more_events) {
  Rig rig;
  train(rig, 8, 3);
  const std::size_t objects = rig.runtime.live_objects();
  train(rig, 0, 20);
  rig.engine.statistics(); // what was timed is over
  const std::size_t copies = static_cast<std::size_t>(rig.engine.statistics().written_back.count);
  CHECK(copies > 50);
  CHECK(rig.runtime.live_objects() < objects + 10);
}

TEST(what_comes_after_an_operator_waits_for_it_though_the_operator_could_not_be_made_to_wait) {
  Rig rig;
  Storage& used = rig.make(1);
  while (used.block != nullptr) {
    rig.make(9);
  }
  for (const auto& other : rig.storages) {
    if (other.get() != &used) {
      rig.free(*other); // room to come back
    }
  }
  const Stream other = rig.runtime.create_stream(0, 0);
  const Event kernel = rig.runtime.create_event(0, false);
  rig.runtime.hold(kStream);
  rig.run(76, {&used}, false, [] {}); // fetched on this stream, and not there yet
  CHECK(used.block != nullptr);
  rig.runtime.hold(other);
  rig.runtime.fail("wait_event", 1);
  Engine::Frame frame;
  {
    const Engine::Lock lock(rig.engine);
    const Engine::Operand operand{used.record, true};
    rig.engine.begin(frame, {77, "test", false, false, false}, std::span(&operand, 1), {other});
    rig.runtime.record_event(kernel, other);
    Rig::write(used, 2);
    rig.engine.end(frame);
  }
  CHECK(rig.engine.statistics().failures > 0);
  rig.runtime.clear_calls();
  CHECK(rig.engine.pressure_callback().make_room(kBudget - 4 * kSlot, Location::device(0), kStream));
  CHECK(used.block == nullptr);
  Rig::check(used);
  bool ordered = false;
  for (const RecordedCall& call : rig.runtime.calls()) {
    ordered = ordered || (call.name == "record_event" && call.stream == other);
    CHECK(ordered || call.name != "copy_async"); // the write-back comes after the kernel
  }
  CHECK(ordered);
  rig.runtime.destroy_event(kernel);
  rig.runtime.destroy_stream(other);
}

} // namespace

HARNESS_MAIN()
