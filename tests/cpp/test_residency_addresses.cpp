// When a storage's address may change: never while an operator of any thread, a pin or an unseen kernel uses it.
#include <chrono>
#include <thread>

#include "residency_rig.h"

namespace {

using namespace residency;

/// An operator from its begin to its end.
class Running {
 public:
  /// \param thread of the program; nullptr: it is in a backward
  Running(Rig& rig, OperatorKey key, const std::vector<Storage*>& used, bool in_place_ok = false,
          const Thread* thread = nullptr)
      : rig_(rig) {
    frame_.key = key;
    frame_.thread = thread;
    const Engine::Lock lock(rig.engine);
    rig.engine.begin(frame_, {key, "test", in_place_ok, false, false}, operands(used), rig.streams);
  }
  ~Running() {
    end();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  void begin_nested(const std::vector<Storage*>& used) {
    const Engine::Lock lock(rig_.engine);
    rig_.engine.begin_nested(frame_, operands(used), rig_.streams);
  }
  void end() {
    if (!ended_) {
      const Engine::Lock lock(rig_.engine);
      rig_.engine.end(frame_);
      ended_ = true;
    }
  }

 private:
  static std::vector<Engine::Operand> operands(const std::vector<Storage*>& used) {
    std::vector<Engine::Operand> found;
    for (const Storage* const storage : used) {
      found.push_back({storage->record, false});
    }
    return found;
  }

  Rig& rig_;
  Engine::Frame frame_;
  bool ended_ = false;
};

/// Returns a storage that was evicted because others fill the budget.
Storage& on_host(Rig& rig) {
  for (unsigned char number = 1; rig.storages.empty() || rig.storages.front()->block != nullptr; ++number) {
    rig.make(number);
    CHECK(number < 100);
  }
  return *rig.storages.front();
}

bool hold(Rig& rig, Storage& storage) {
  const Engine::Lock lock(rig.engine);
  return rig.engine.pin(storage.record, kStream);
}

void release(Rig& rig, Storage& storage) {
  const Engine::Lock lock(rig.engine);
  rig.engine.unpin(storage.record);
}

TEST(a_storage_used_on_the_host_by_another_thread_is_not_fetched) {
  Rig rig;
  Storage& storage = on_host(rig);
  const unsigned char* const address = storage.ptr;
  Running first(rig, 50, {&storage}, /*in_place_ok=*/true);
  CHECK(storage.ptr == address);
  {
    const Running second(rig, 51, {&storage}); // the other storages could be evicted to make room
    CHECK(storage.ptr == address);
    Rig::check(storage);
  }
  first.end();
  const Running third(rig, 51, {&storage});
  CHECK(storage.block != nullptr);
  Rig::check(storage);
  rig.check_engine();
}

TEST(a_nested_operators_operand_stays_after_another_thread_ends) {
  Rig rig;
  Storage& shared = rig.make(1);
  Storage& own = rig.make(2);
  Running other_thread(rig, 50, {&shared});
  Running outer(rig, 51, {&own});
  outer.begin_nested({&shared});
  other_thread.end();
  const unsigned char* const address = shared.ptr;
  for (unsigned char number = 3; number < 12; ++number) {
    rig.make(number);
  }
  CHECK(shared.ptr == address);
  outer.end();
  for (unsigned char number = 12; shared.block != nullptr; ++number) {
    rig.make(number);
    CHECK(number < 100);
  }
  rig.check_engine();
}

TEST(a_result_seen_first_by_a_nested_operator_belongs_to_the_loop_of_the_outer_one) {
  Rig rig;
  const Thread threads[] = {std::make_shared<char>(), std::make_shared<char>()};
  Storage& first = rig.make(1);
  Storage& second = rig.make(2);
  {
    const Running forward(rig, 50, {&first}, false, &threads[0]);
  }
  {
    const Running forward(rig, 51, {&second}, false, &threads[1]);
  }
  const std::size_t loop = second.record->loop;
  CHECK(loop != first.record->loop);
  rig.storages.push_back(std::make_unique<Storage>());
  Storage& result = *rig.storages.back();
  {
    Running backward(rig, 52, {&second});
    result.block = rig.memory.allocate(kBytes, Location::device(0), kStream);
    result.ptr = static_cast<unsigned char*>(rig.memory.data(result.block));
    {
      const Engine::Lock lock(rig.engine);
      result.record = rig.engine.adopt(result.block, 0, &result);
    }
    backward.begin_nested({&result});
  }
  {
    const Running backward(rig, 53, {&result, &second});
  }
  CHECK_EQ(result.record->loop, loop);
  CHECK_EQ(second.record->loop, loop);
  rig.check_engine();
}

TEST(a_pin_waits_for_an_operator_that_uses_the_storage_on_the_host) {
  Rig rig;
  Storage& storage = on_host(rig);
  Running running(rig, 50, {&storage}, /*in_place_ok=*/true);
  const unsigned char* const address = storage.ptr;
  CHECK(!hold(rig, storage));
  CHECK(storage.ptr == address);
  running.end();
  CHECK(hold(rig, storage));
  CHECK(storage.block != nullptr);
  release(rig, storage);
  rig.check_engine();
}

TEST(a_pin_without_room_throws_and_pins_nothing) {
  Rig rig;
  Storage& refused = on_host(rig);
  std::vector<Storage*> pinned;
  for (const auto& storage : rig.storages) {
    if (storage->block != nullptr) {
      CHECK(hold(rig, *storage));
      pinned.push_back(storage.get());
    }
  }
  CHECK_THROWS(OutOfMemory, hold(rig, refused));
  for (Storage* const storage : pinned) {
    release(rig, *storage);
  }
  CHECK(hold(rig, refused));
  const unsigned char* const address = refused.ptr;
  for (unsigned char number = 50; number < 60; ++number) {
    rig.make(number);
  }
  CHECK(refused.ptr == address);
  release(rig, refused);
  // the refused pin left no count: one unpin is enough
  for (unsigned char number = 60; refused.block != nullptr; ++number) {
    rig.make(number);
    CHECK(number < 100);
  }
  rig.check_engine();
}

TEST(a_budget_that_is_lifted_waits_for_operators_that_use_storages_on_the_host) {
  Rig rig;
  Storage& storage = on_host(rig);
  Running running(rig, 50, {&storage}, /*in_place_ok=*/true);
  const unsigned char* const address = storage.ptr;
  std::thread lifts([&] { rig.engine.set_budget(0, std::nullopt); });
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
  while (std::chrono::steady_clock::now() < until) {
    const Engine::Lock lock(rig.engine);
    CHECK(storage.ptr == address);
  }
  CHECK(rig.engine.budget(0).has_value());
  running.end();
  lifts.join();
  CHECK(storage.block != nullptr);
  CHECK(!rig.engine.budget(0).has_value());
  Rig::check(storage);
  rig.check_engine();
}

TEST(nothing_is_evicted_while_unseen_kernels_run) {
  Rig rig;
  rig.adapter.unseen = 0;
  for (unsigned char number = 1; number <= 4; ++number) {
    rig.make(number);
  }
  rig.engine.set_budget(0, std::nullopt);
  rig.adapter.unseen = 1; // the kernel began while there was no budget
  rig.engine.set_budget(0, kBudget);
  std::vector<const unsigned char*> addresses;
  for (const auto& storage : rig.storages) {
    addresses.push_back(storage->ptr);
  }
  for (unsigned char number = 5; number < 9; ++number) {
    rig.free(rig.make(number));
    rig.storages.pop_back();
  }
  for (std::size_t index = 0; index < addresses.size(); ++index) {
    CHECK(rig.storages[index]->ptr == addresses[index]);
  }
  CHECK(rig.engine.statistics().over_budget > 0);
  rig.adapter.unseen = 0;
  for (unsigned char number = 9; number < 13; ++number) {
    rig.make(number);
  }
  CHECK(rig.storages.front()->block == nullptr);
  rig.check_engine();
}

} // namespace

HARNESS_MAIN()
