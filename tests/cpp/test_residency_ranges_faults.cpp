// The engine over storages that are address ranges: no room, budgets that change, frees, threads, failing calls.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ranges_rig.h"
#include "runtime/testing/emulated_failures.h"

using namespace torch_uvm;
using namespace ranges_rig;

TEST(a_storage_that_is_freed_while_it_is_written_back_keeps_its_memory_until_then) {
  int freed = 0;
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    std::vector<Storage*> all;
    for (int count = 0; count < 8; ++count) {
      all.push_back(&rig.make());
    }
    for (int step = 0; step < 24; ++step) {
      for (std::size_t at = 0; at < all.size(); ++at) {
        rig.use({all[at]}, 10 + at);
        if (step > 10 && step % 3 == 0 && all[at]->record->retiring) {
          ++freed;
          rig.free(*all[at]);
          rig.memory.empty_cache();
          std::erase_if(rig.storages, [&](const auto& storage) { return storage.get() == all[at]; });
          all[at] = &rig.make();
        }
        rig.is_well();
      }
      rig.engine.mark_step();
    }
    rig.free_all();
  }
  CHECK(freed > 0);
}

TEST(without_a_mapping_an_operand_is_used_at_another_address) {
  Rig rig;
  std::vector<Storage*> all;
  for (int count = 0; count < 4; ++count) {
    all.push_back(&rig.make());
  }
  void* const other = rig.evict_and_fill_device(*all[0]);
  EmulatedFailures failures(rig.runtime);
  failures.fail("map", 1); // of its pinned memory
  for (unsigned char round = 0; round < 2; ++round) {
    rig.run(3, {all[0]}, true, [&] {
      CHECK(all[0]->ptr != all[0]->address && Rig::is_right(*all[0]));
      std::memset(all[0]->ptr, ++all[0]->content, kBytes);
    });
    CHECK(!rig.engine.check());
  }
  CHECK_EQ(rig.engine.statistics().failures, 1);
  rig.runtime.free_device(other);
  rig.use({all[0], all[1]}); // checks the address
  CHECK(!rig.engine.check());
}

TEST(a_storage_may_be_freed_in_any_state) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    std::mt19937 random(3);
    for (int step = 0; step < 80; ++step) {
      if (rig.storages.size() < 7 || random() % 2 == 0) {
        rig.make();
      } else {
        const std::size_t at = random() % rig.storages.size();
        rig.free(*rig.storages[at]); // on the device, on the host, while it is written back
        rig.storages.erase(rig.storages.begin() + static_cast<std::ptrdiff_t>(at));
      }
      rig.use({rig.storages[random() % rig.storages.size()].get()}, 2 + random() % 2);
      rig.is_well();
    }
    rig.free_all();
  }
}

TEST(budgets_change_and_end) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    std::vector<Storage*> all;
    for (int count = 0; count < 8; ++count) {
      all.push_back(&rig.make());
    }
    for (const std::size_t budget : {2 * kBytes, 6 * kBytes, 3 * kBytes}) {
      rig.engine.set_budget(0, budget);
      CHECK(rig.memory.levels(Location::device(0)).reserved_bytes[0] <= static_cast<std::int64_t>(budget));
      for (Storage* const storage : all) {
        rig.use({storage});
        CHECK(!rig.engine.check());
      }
    }
    rig.engine.set_budget(0, std::nullopt);
    for (Storage* const storage : all) { // all are back, and none is watched
      CHECK(storage->block != nullptr && storage->ptr == storage->address && Rig::is_right(*storage));
    }
    rig.engine.set_budget(0, kBudget);
    for (Storage* const storage : all) {
      rig.use({storage});
    }
    rig.is_well();
  }
}

TEST(a_soft_budget_sleeps_and_wakes) {
  Rig rig;
  rig.engine.set_budget(0, kBudget);
  std::vector<Storage*> all;
  for (int count = 0; count < 8; ++count) { // the fifth wakes the engine
    all.push_back(&rig.make());
  }
  for (int round = 0; round < 3; ++round) {
    for (Storage* const storage : all) {
      rig.use({storage});
    }
  }
  rig.is_well(false);
  CHECK(rig.engine.statistics().written_back.count > 0);
  CHECK(rig.memory.levels(Location::device(0)).reserved_bytes[0] <= static_cast<std::int64_t>(kBudget));
}

TEST(another_threads_operands_keep_their_memory) {
  Rig rig;
  Storage& used = rig.make();
  Engine::Frame frame;
  frame.key = 9;
  rig.begin(frame, {&used}, true);
  std::thread other([&] {
    for (int count = 0; count < 8; ++count) {
      rig.make();
    }
  });
  for (int round = 0; round < 200; ++round) {
    CHECK(Rig::is_right(used));
    std::memset(used.ptr, ++used.content, kBytes);
  }
  other.join();
  CHECK(used.block != nullptr);
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.end(frame);
  }
  rig.use({&used});
  rig.is_well();
}

TEST(threads_race_over_one_budget) {
  for (const Seed seed : {Seed{}, Seed{5}}) {
    Rig rig(seed);
    std::vector<std::vector<Storage*>> all(2);
    for (int count = 0; count < 8; ++count) {
      all[static_cast<std::size_t>(count % 2)].push_back(&rig.make());
    }
    std::vector<std::thread> threads;
    for (std::vector<Storage*>& own : all) {
      threads.emplace_back([&rig, &own] {
        for (int round = 0; round < 30; ++round) {
          for (Storage* const storage : own) {
            rig.use({storage});
          }
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    rig.is_well();
  }
}

TEST(each_failing_call_loses_no_byte) {
  for (std::size_t nth = 1; nth < 300; nth += nth < 40 ? 1 : 13) {
    for (const char* const call : {"*", "unmap", "map", "allocate_piece"}) {
      Rig rig;
      std::vector<Storage*> all;
      for (int count = 0; count < 6; ++count) {
        all.push_back(&rig.make());
      }
      EmulatedFailures failures(rig.runtime);
      failures.fail(call, nth);
      for (int round = 0; round < 3; ++round) {
        for (Storage* const storage : all) {
          rig.run(2, {storage}, true, [&] { // by any address: the device may have failed
            CHECK(Rig::is_right(*storage));
            std::memset(storage->ptr, ++storage->content, storage->bytes);
          });
          if (const auto wrong = rig.engine.check()) {
            harness::fail(__FILE__, __LINE__, std::string(call) + " " + std::to_string(nth) + ": " + *wrong);
          }
        }
      }
      if (failures.clear() != 0 && std::string(call) != "*") {
        break; // no call fails any more
      }
      for (Storage* const storage : all) {
        rig.use({storage}); // at its address
      }
    }
  }
}

HARNESS_MAIN()
