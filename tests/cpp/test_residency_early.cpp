// Early write-backs: a storage is copied to the host right after its last write, while operators still read it, and is
// only dropped when it leaves.
#include <cstddef>
#include <string>

#include "residency/policy/schedule.h"
#include "residency_rig.h"
#include "residency_script.h"

using namespace residency;
using namespace torch_uvm::scheduling;
using script::Script;

namespace {

/// By operator, the persistent storages that are written back after it and stay.
std::string write_backs(Schedule& schedule) {
  write_back_early(schedule);
  std::string text;
  for (std::uint32_t op = 0; op < schedule.iteration.size(); ++op) {
    for (const std::uint32_t value : schedule.write_back[op]) {
      text += std::to_string(op) + ':' + std::to_string(schedule.iteration.values[value].persistent) + ' ';
    }
  }
  return text;
}

Schedule scheduled(const Script& script, std::uint32_t operators, std::size_t capacity) {
  Schedule schedule;
  schedule.iteration = make_iteration(script.log(), operators);
  choose_evictions(schedule, script::options(capacity), capacity);
  place_fetches(schedule, capacity);
  return schedule;
}

/// Two storages of which one fits. Each is written, and then read for a long time.
Schedule written_and_read() {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    for (const StorageId storage : {1, 2}) {
      script.op(10 * storage, {{storage, true}});
      script.op(10 * storage + 1, {{storage, false}});
    }
  }
  Schedule schedule = scheduled(script, 4, 8);
  for (std::uint32_t op = 0; op < 4; ++op) {
    schedule.iteration.ops[op].ms = op % 2 == 0 ? 1 : 20;
  }
  return schedule;
}

constexpr std::size_t kCount = 8; ///< storages, of which the budget holds fewer

/// A step: each storage is written, then read by the next operator.
/// \param running while the reader runs: called with the storage
template <typename Running>
void step(Rig& rig, unsigned char content, Running running) {
  for (std::size_t index = 0; index < kCount; ++index) {
    Storage& storage = *rig.storages[index];
    rig.run(100 + index, {&storage}, true, [&] {
      Rig::check(storage);
      Rig::write(storage, static_cast<unsigned char>(content + index));
    });
    rig.run(200 + index, {&storage}, false, [&] {
      Rig::check(storage);
      running(storage);
    });
  }
}

void settle(Rig& rig) {
  for (std::size_t index = 0; index < kCount; ++index) {
    rig.make(static_cast<unsigned char>(index));
  }
  for (unsigned char round = 0; round < 12; ++round) {
    step(rig, round, [](Storage&) {});
  }
}

} // namespace

TEST(a_write_back_hides_behind_the_operators_that_read) {
  Schedule schedule = written_and_read();
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 8), 74.0); // twice: write 1, read 20, write back 8, fetch 8
  CHECK_EQ(write_backs(schedule), std::string("0:1 2:2 "));
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 1, 1), 8), 58.0); // the write-backs are done long before the reads
  const LinkRates slowing{1, 1, 1, 2, 0, /*slowed=*/0.5};
  CHECK_EQ(predict_ms(schedule, slowing, 8), 66.0); // both write-backs are beside the reads
  CHECK_EQ(predict_ms(schedule, script::ideal(1, 0.25, 1), 8), 82.0); // 32 to write back: 12 longer than the read
}

TEST(early_write_backs_are_made_if_they_are_faster) {
  Schedule schedule = written_and_read();
  PolicyOptions options = script::options(8);
  options.rates = script::ideal(1, 1, 1);
  choose_fastest(schedule, options);
  CHECK_EQ(schedule.predicted_ms, 58.0); // without them 74
  CHECK_EQ(schedule.write_back[0].size(), 1U);
}

TEST(what_leaves_right_after_its_write_is_written_back_then) {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, true}});
    script.op(20, {{2, true}});
  }
  Schedule schedule = scheduled(script, 2, 8);
  CHECK(schedule.evicted_after[0] && schedule.evicted_after[1]);
  CHECK_EQ(write_backs(schedule), std::string());
}

TEST(what_is_only_read_is_not_written_back) {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    for (const OperatorKey key : {10, 11, 20, 21}) {
      script.op(key, {{key / 10, false}});
    }
  }
  Schedule schedule = scheduled(script, 4, 8);
  CHECK(schedule.evicted_after[1] && schedule.evicted_after[3]);
  CHECK_EQ(write_backs(schedule), std::string());
}

/// Storage 1 is written by the last operator, and leaves after the first one of the next iteration.
TEST(the_last_write_may_be_in_the_iteration_before) {
  Script script({{1, 8}, {2, 8}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, false}});
    script.op(11, {{2, false}});
    script.op(12, {{1, true}});
  }
  Schedule schedule = scheduled(script, 3, 8);
  CHECK(schedule.evicted_after[0]);
  CHECK_EQ(write_backs(schedule), std::string("2:1 "));
}

TEST(a_storage_is_on_the_host_while_it_is_read_and_copied_once) {
  Rig rig;
  settle(rig);
  const ResidencyStatistics before = rig.engine.statistics();
  int early = 0;
  step(rig, 50, [&](const Storage& storage) { early += storage.record->host_valid ? 1 : 0; });
  const ResidencyStatistics after = rig.engine.statistics();
  CHECK(early > 1);
  CHECK_EQ(after.written_back.count - before.written_back.count, early);
  CHECK_EQ(after.fetched.count - before.fetched.count, early);
  rig.check_engine();
  step(rig, 60, [](const Storage&) {});
}

TEST(a_write_that_the_schedule_does_not_have_is_not_lost) {
  Rig rig;
  settle(rig);
  int spoilt = 0;
  for (std::size_t index = 0; index < kCount; ++index) {
    Storage& storage = *rig.storages[index];
    rig.run(100 + index, {&storage}, true, [&] { Rig::write(storage, 70); });
    const bool early = storage.record->host_valid;
    rig.run(200 + index, {&storage}, true, [&] { // it only read in the iterations before
      spoilt += early && !storage.record->host_valid ? 1 : 0;
      Rig::write(storage, static_cast<unsigned char>(80 + index));
    });
  }
  CHECK(spoilt > 1);
  rig.check_engine();
  step(rig, 90, [](const Storage&) {});
}

/// The host is ahead: the write, its write-back and the read are all queued when the storage is to leave.
TEST(what_is_not_written_back_yet_leaves_later) {
  Rig rig;
  settle(rig);
  int waiting = 0;
  for (std::size_t index = 0; index < kCount; ++index) {
    Storage& storage = *rig.storages[index];
    rig.runtime.hold(kStream);
    rig.run(100 + index, {&storage}, true, [&] { Rig::write(storage, static_cast<unsigned char>(30 + index)); });
    rig.run(200 + index, {&storage}, false, [&] { Rig::check(storage); });
    const bool waits = storage.record->retiring;
    CHECK(!waits || storage.record->points_at == Side::kDevice);
    rig.runtime.release(kStream);
    if (waits) {
      ++waiting;
      rig.run(300, {rig.storages[(index + kCount - 1) % kCount].get()}, false, [] {});
      CHECK(storage.record->points_at == Side::kHost);
    }
  }
  CHECK(waiting > 0);
  rig.check_engine();
  step(rig, 60, [](const Storage&) {});
}

TEST(calls_that_fail_lose_nothing) {
  for (const char* const call : {"copy_async", "record_event", "wait_event", "query_event", "create_event"}) {
    for (std::size_t nth = 1; nth <= 24; ++nth) {
      Rig rig;
      settle(rig);
      rig.runtime.fail(call, nth);
      step(rig, 100, [](const Storage&) {});
      rig.runtime.clear_failures();
      step(rig, 110, [](const Storage&) {});
      rig.check_engine();
    }
  }
}

HARNESS_MAIN()
