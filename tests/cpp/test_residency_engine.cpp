// The engine over storages of a test's own: right bytes, within the budget, whatever call of the runtime fails.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "allocator/caching_managed_allocator.h"
#include "harness.h"
#include "residency/engine.h"
#include "runtime/bytes.h"
#include "runtime/recording_runtime.h"

namespace {

using namespace torch_uvm;

constexpr std::size_t kBytes = 2 * MiB;
constexpr std::size_t kBudget = 8 * MiB;
constexpr Stream kStream = Stream::default_of(0);

/// What stands for a tensor's storage: a pointer, and the byte that the test knows to be everywhere in it.
struct Storage {
  Block* block = nullptr; ///< nullptr: on the host
  unsigned char* ptr = nullptr;
  unsigned char content = 0;
  std::size_t bytes = kBytes;
  Record* record = nullptr;
  bool gone = false; ///< its bytes are somebody else's: it must not be moved
};

class Door final : public StorageDoor {
 public:
  explicit Door(CachingManagedAllocator& memory) : memory_(memory) {}
  bool keep(const Record& record, std::vector<void*>& /*kept*/) override {
    return !of(record).gone;
  }
  void let_go(void* /*kept*/) noexcept override {}
  void point_at_host(Record& record, void* ptr) noexcept override {
    of(record).block = nullptr;
    of(record).ptr = static_cast<unsigned char*>(ptr);
  }
  void point_at_device(Record& record, Block* block) noexcept override {
    of(record).block = block;
    of(record).ptr = static_cast<unsigned char*>(memory_.data(block));
  }
  void watch_for_writes(Record& /*record*/, std::vector<void*>& /*kept*/) override {}
  void wake() noexcept override {
    ++woken;
  }
  void forget(Record& /*record*/) noexcept override {}

  int woken = 0;

 private:
  static Storage& of(const Record& record) {
    return *static_cast<Storage*>(record.storage);
  }
  CachingManagedAllocator& memory_;
};

struct Rig {
  RecordingRuntime runtime;
  CachingManagedAllocator memory{runtime, std::make_unique<ManagedSegmentSource>(runtime)};
  Door door{memory};
  Engine engine{runtime, memory, door};
  std::vector<std::unique_ptr<Storage>> storages;
  const std::vector<Stream> streams{kStream};

  explicit Rig(bool hard = true) {
    engine.set_budget(0, kBudget, hard);
  }
  ~Rig() {
    for (const auto& storage : storages) {
      free(*storage);
    }
    memory.set_room_maker(nullptr);
  }

  void free(Storage& storage) {
    Block* const block = storage.block;
    if (storage.record != nullptr) {
      engine.died(storage.record);
    }
    memory.free(block);
    storage = Storage{};
  }

  /// Runs `kernel` as an operator on these storages, the first of which it may write to.
  template <typename Kernel>
  void run(OperatorKey key, const std::vector<Storage*>& used, bool writes, Kernel kernel) {
    if (!engine.is_awake()) {
      kernel();
      return;
    }
    Engine::Frame frame;
    frame.key = key;
    {
      const Engine::Lock lock(engine);
      std::vector<Engine::Operand> operands;
      for (Storage* const storage : used) {
        if (storage->record == nullptr && engine.watches(0)) {
          storage->record = engine.adopt(storage->block, 0, storage);
        }
        if (storage->record != nullptr) {
          operands.push_back({storage->record, writes && storage == used.front()});
        }
      }
      engine.begin(frame, {key, "test", false, false, false}, operands, streams);
    }
    kernel();
    const Engine::Lock lock(engine);
    engine.end(frame);
  }

  /// A new storage, filled. \throws OutOfMemory
  Storage& make(unsigned char content, std::size_t bytes = kBytes) {
    Block* const block = memory.allocate(bytes, Location::device(0), kStream);
    storages.push_back(std::make_unique<Storage>());
    Storage& made = *storages.back();
    made.bytes = bytes;
    made.block = block;
    made.ptr = static_cast<unsigned char*>(memory.data(block));
    engine.note_allocation(0);
    run(1, {&made}, true, [&] { write(made, content); });
    return made;
  }

  static void write(Storage& storage, unsigned char content) {
    std::memset(storage.ptr, content, storage.bytes);
    storage.content = content;
  }
  static void check(const Storage& storage) {
    CHECK(storage.ptr[0] == storage.content);
    CHECK(storage.ptr[storage.bytes / 2] == storage.content);
    CHECK(storage.ptr[storage.bytes - 1] == storage.content);
  }
  void check_engine() {
    if (const auto wrong = engine.check()) {
      harness::fail(__FILE__, __LINE__, *wrong);
    }
  }
  std::int64_t reserved() const {
    return memory.statistics(Location::device(0)).reserved_bytes[0].current;
  }
};

/// Steps over more storages than the budget holds: each reads two and writes to one of them.
void train(Rig& rig, int storages, int steps) {
  for (int number = 0; number < storages; ++number) {
    try {
      rig.make(static_cast<unsigned char>(number + 1));
    } catch (const OutOfMemory&) {
      // A call that was made to fail; the others have what they had.
    }
  }
  const std::size_t count = rig.storages.size();
  for (int step = 0; step < steps; ++step) {
    for (std::size_t index = 0; index < count; ++index) {
      Storage& written = *rig.storages[index];
      Storage& read = *rig.storages[(index + 1) % count];
      rig.run(10 + index, {&written, &read}, true, [&] {
        Rig::check(written);
        Rig::check(read);
        Rig::write(written, static_cast<unsigned char>(written.content + 1));
      });
      rig.check_engine();
    }
  }
}

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
    rig.engine.settle(storage->record);
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
    rig.engine.hold(held.record, kStream);
  }
  labelled.gone = true;
  const unsigned char* const addresses[] = {held.ptr, labelled.ptr};
  train(rig, 6, 3);
  CHECK(held.ptr == addresses[0]);
  CHECK(labelled.ptr == addresses[1]);
  const Engine::Lock lock(rig.engine);
  rig.engine.release(held.record);
}

/// Into a graph that is being captured.
void capture(Rig& rig, Storage& storage, bool writes) {
  const Engine::Lock lock(rig.engine);
  if (storage.record == nullptr) {
    storage.record = rig.engine.adopt(storage.block, 0, &storage);
  }
  const Engine::Operand operand{storage.record, writes};
  rig.engine.captured({&operand, 1});
}

TEST(what_a_graph_has_captured_stays_until_the_graph_is_gone) {
  Rig rig;
  Storage& captured = rig.make(1);
  const std::uint64_t graph = rig.engine.begin_capture();
  const std::uint64_t other = rig.engine.begin_capture();
  capture(rig, captured, true);
  rig.engine.end_capture(other);
  rig.engine.end_capture(graph);
  CHECK(!rig.engine.has_open_captures());
  const unsigned char* const address = captured.ptr;
  train(rig, 7, 3);
  CHECK(captured.ptr == address);
  rig.write(captured, 9); // a launch: nobody sees it
  rig.engine.release_capture(graph);
  rig.engine.release_capture(graph);
  for (std::size_t index = 1; index < rig.storages.size(); ++index) {
    rig.run(40, {rig.storages[index].get()}, true, [] {});
  }
  CHECK(captured.ptr == address); // the other one may have it
  rig.engine.release_capture(other);
  for (std::size_t index = 1; index < rig.storages.size(); ++index) {
    rig.run(40, {rig.storages[index].get()}, true, [] {});
  }
  CHECK(captured.block == nullptr);
  Rig::check(captured);
  train(rig, 0, 2);
}

TEST(what_was_captured_on_the_host_stays_there) {
  Rig rig;
  train(rig, 8, 2);
  Storage* captured = nullptr;
  for (const auto& storage : rig.storages) {
    captured = storage->block == nullptr ? storage.get() : captured;
  }
  CHECK(captured != nullptr);
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, *captured, true);
  rig.engine.end_capture(graph);
  const unsigned char* const address = captured->ptr;
  train(rig, 0, 3);
  CHECK(captured->ptr == address);
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.hold(captured->record, kStream);
    rig.engine.release(captured->record);
  }
  rig.engine.set_budget(0, std::nullopt, false); // all that can comes back
  CHECK(captured->ptr == address);
  rig.engine.set_budget(0, kBudget, true);
  rig.engine.release_capture(graph);
  rig.run(41, {captured}, false, [&] { Rig::check(*captured); });
  CHECK(captured->block != nullptr);
}

TEST(a_graph_that_was_captured_before_there_is_a_budget_keeps_its_addresses) {
  Rig rig;
  rig.engine.set_budget(0, std::nullopt, false);
  Storage& captured = rig.make(1);
  CHECK(captured.record == nullptr);
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, captured, false);
  rig.engine.end_capture(graph);
  rig.engine.set_budget(0, kBudget, true);
  const unsigned char* const address = captured.ptr;
  train(rig, 7, 3);
  CHECK(captured.ptr == address);
  rig.engine.release_capture(graph);
}

TEST(bytes_leave_after_the_last_launch_of_their_graph) {
  Rig rig;
  Storage& captured = rig.make(1);
  const std::uint64_t graph = rig.engine.begin_capture();
  capture(rig, captured, true);
  rig.engine.end_capture(graph);
  const Stream launches = rig.runtime.create_stream(0, 0);
  rig.engine.replayed(graph, launches);
  rig.engine.replayed(graph, launches);
  rig.engine.release_capture(graph);
  rig.runtime.hold(launches);
  const Event launched = rig.runtime.create_event(0, false);
  rig.runtime.record_event(launched, launches); // and not reached: the launch is under way
  rig.runtime.clear_calls();
  train(rig, 7, 3);
  bool ordered = false;
  for (const RecordedCall& call : rig.runtime.calls()) {
    ordered = ordered || (call.name == "record_event" && call.stream == launches);
  }
  CHECK(ordered);
  rig.runtime.release(launches);
  rig.runtime.destroy_event(launched);
}

TEST(a_compiled_graph_may_exceed_the_budget_by_what_is_between_its_kernels) {
  Rig rig;
  Storage& input = rig.make(1);
  Engine::Frame frame;
  Block* between[4] = {};
  const auto allocate = [&](Block*& block) { block = rig.memory.allocate(kBytes, Location::device(0), kStream); };
  {
    const Engine::Lock lock(rig.engine);
    const Engine::Operand operand{input.record, false};
    rig.engine.begin(frame, {50, "graph", false, false, /*region=*/true}, {&operand, 1}, rig.streams);
  }
  for (Block*& block : between) {
    allocate(block);
  }
  for (Block*& block : between) {
    rig.memory.free(block);
  }
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.end(frame);
  }
  CHECK(rig.engine.statistics().over_budget == 1);
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
}

TEST(a_soft_budget_sleeps_until_memory_is_short) {
  Rig rig(/*hard=*/false);
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number);
  }
  CHECK(!rig.engine.is_awake());
  CHECK(rig.door.woken == 0);
  rig.make(5);
  CHECK(rig.engine.is_awake());
  CHECK(rig.door.woken == 1);
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
  CHECK(rig.door.woken == 1);
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
  CHECK(rig.engine.is_unsettled());
  CHECK(rig.engine.statistics().over_budget > 0); // it could not wait
  train(rig, 0, 8);
  CHECK(!rig.engine.is_unsettled());
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
}

TEST(who_records_or_captures_wakes_the_engine) {
  Rig rig;
  train(rig, 3, 200);
  CHECK(!rig.engine.is_awake());
  rig.engine.wake(0);
  CHECK(rig.engine.is_awake());
  CHECK(rig.door.woken == 1);
  train(rig, 0, 400);
  CHECK(!rig.engine.is_awake());
  CHECK(rig.reserved() <= static_cast<std::int64_t>(kBudget));
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

TEST(what_is_in_the_way_of_a_large_request_moves_aside) {
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
  for (std::size_t nth = 1; reached; ++nth) {
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
  for (std::size_t nth = 1;; ++nth) {
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

} // namespace

HARNESS_MAIN()
