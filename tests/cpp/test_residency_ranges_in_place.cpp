// The engine over storages that are address ranges and are used in place: in pinned memory, at their own address.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "ranges_rig.h"
#include "runtime/testing/emulated_failures.h"

using namespace torch_uvm;
using namespace ranges_rig;

namespace {

std::vector<Storage*> make_all(Rig& rig, int count) {
  std::vector<Storage*> all;
  for (; count > 0; --count) {
    all.push_back(&rig.make());
  }
  return all;
}

void pin(Rig& rig, const std::vector<Storage*>& storages, bool on) {
  const Engine::Lock lock(rig.engine);
  for (Storage* const storage : storages) {
    on ? static_cast<void>(rig.engine.pin(storage->record, kStream)) : rig.engine.unpin(storage->record);
  }
}

/// Adds one to the first storage and reads the others, in an operator that may use them in place.
void step(Rig& rig, const std::vector<Storage*>& used, OperatorKey key = 20) {
  rig.run(
      key, used, true,
      [&] {
        for (Storage* const storage : used) {
          CHECK(storage->ptr == storage->address);
          CHECK(Rig::is_right(*storage));
        }
        ++used.front()->content;
        std::memset(used.front()->ptr, used.front()->content, used.front()->bytes);
      },
      /*in_place_ok=*/true);
}

} // namespace

TEST(an_operand_without_room_is_used_at_its_address) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    const std::vector<Storage*> all = make_all(rig, 8);
    const std::vector<Storage*> four(all.begin(), all.begin() + 4); // all of the budget
    pin(rig, four, true);
    for (int round = 0; round < 3; ++round) {
      rig.use({all[5], all[6]});
      CHECK(all[5]->block == nullptr && all[6]->block == nullptr);
      rig.is_well(false);
    }
    CHECK_EQ(rig.memory.levels(Location::device(0)).reserved_bytes[0], static_cast<std::int64_t>(kBudget));
    CHECK_EQ(rig.engine.statistics().over_budget, 3); // operators
    CHECK_EQ(rig.engine.statistics().used_in_place.count, 6);
    pin(rig, four, false);
    rig.use({all[5], all[6]}); // has the bytes that were written in place
    CHECK(all[5]->block != nullptr && all[6]->block != nullptr);
    rig.is_well(false);
    rig.press();
    rig.free_all();
  }
}

TEST(without_device_memory_an_operand_is_used_at_its_address) {
  Rig rig;
  const std::vector<Storage*> all = make_all(rig, 4);
  void* const other = rig.evict_and_fill_device(*all[0]);
  rig.use({all[0]});
  rig.use({all[0]});
  CHECK(all[0]->block == nullptr);
  rig.is_well(false);
  rig.runtime.free_device(other);
  rig.use({all[0], all[1]});
  CHECK(all[0]->block != nullptr);
  rig.is_well(false);
}

TEST(state_that_stays_on_the_host_is_mapped_once) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    const std::vector<Storage*> parameters = make_all(rig, 3);
    const std::vector<Storage*> states = make_all(rig, 6);
    std::uint64_t mapped = 0;
    for (int count = 0; count < 30; ++count) {
      if (count == 20) {
        mapped = rig.runtime.counters(0).map_calls;
      }
      for (std::size_t at = 0; at < parameters.size(); ++at) {
        rig.use({parameters[at]}, 10 + at);
      }
      std::vector<Storage*> every = states; // as a fused optimizer
      every.insert(every.end(), parameters.begin(), parameters.end());
      step(rig, every);
      rig.engine.mark_step();
      rig.is_well();
    }
    CHECK(rig.engine.statistics().used_in_place.count > 60);
    CHECK_EQ(rig.runtime.counters(0).map_calls, mapped); // nothing moves any more
    rig.free_all();
  }
}

TEST(queued_work_in_place_ends_before_its_memory_goes) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    const std::vector<Storage*> all = make_all(rig, 8);
    const std::vector<Storage*> four(all.begin() + 4, all.end());
    std::vector<unsigned char> seen(kBytes);
    for (int round = 0; round < 4; ++round) {
      Storage& one = *all[static_cast<std::size_t>(round)];
      pin(rig, four, true);
      rig.run(30, {&one}, true, [&] { // "kernels" that are not done when the operator ends
        CHECK(one.block == nullptr && one.ptr == one.address);
        rig.runtime.zero_async(one.ptr, kBytes, kStream);
        rig.runtime.copy_async(seen.data(), one.ptr, kBytes, kStream);
      });
      one.content = 0;
      pin(rig, four, false);
      if (round % 2 == 0) {
        rig.use({&one}); // fetched at once
        CHECK(one.block != nullptr);
      } else {
        rig.free(one);
      }
      rig.is_well(false);
      rig.runtime.synchronize_stream(kStream);
      CHECK(std::ranges::all_of(seen, [](unsigned char byte) { return byte == 0; }));
      std::ranges::fill(seen, 1);
    }
  }
}

TEST(another_threads_operator_keeps_the_memory_that_it_uses_in_place) {
  Rig rig;
  const std::vector<Storage*> all = make_all(rig, 6);
  const std::vector<Storage*> four(all.begin() + 1, all.begin() + 5);
  pin(rig, four, true);
  Engine::Frame frame;
  frame.key = 9;
  rig.begin(frame, {all[0]}, true); // an operator that has begun, and has launched nothing yet
  CHECK(all[0]->block == nullptr);
  pin(rig, four, false);
  rig.use({all[0]}, 3); // of another thread: there is room now, but the first operator has the address
  CHECK(all[0]->block == nullptr);
  rig.press();
  CHECK(Rig::is_right(*all[0]));
  std::memset(all[0]->ptr, ++all[0]->content, kBytes);
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.end(frame);
  }
  rig.use({all[0]}, 3);
  CHECK(all[0]->block != nullptr);
  rig.is_well(false);
}

TEST(random_uses_on_either_side_see_the_right_bytes) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    std::vector<Storage*> all = make_all(rig, 9);
    std::mt19937 random(11);
    for (int count = 0; count < 150; ++count) {
      std::vector<Storage*> used;
      for (Storage* const storage : all) {
        if (random() % 2 == 0) {
          used.push_back(storage);
        }
      }
      std::ranges::shuffle(used, random);
      if (used.size() > 1 && random() % 2 == 0) {
        used.resize(2); // else often more than the budget
      }
      if (!used.empty()) {
        random() % 2 == 0 ? step(rig, used, 20 + random() % 3) : rig.use(used, 2 + random() % 3);
      }
      if (random() % 8 == 0) {
        const std::size_t gone = random() % all.size();
        rig.free(*all[gone]);
        std::erase_if(rig.storages, [&](const auto& storage) { return storage.get() == all[gone]; });
        all[gone] = &rig.make();
      }
      rig.is_well(false);
    }
    CHECK(rig.engine.statistics().used_in_place.count > 50);
    rig.free_all();
  }
}

TEST(each_failing_call_loses_no_byte) {
  for (std::size_t nth = 1; nth < 400; nth += nth < 60 ? 1 : 17) {
    for (const char* const call : {"*", "unmap", "map", "record_event", "wait_event"}) {
      Rig rig;
      const std::vector<Storage*> all = make_all(rig, 7);
      EmulatedFailures failures(rig.runtime);
      failures.fail(call, nth);
      for (int round = 0; round < 3; ++round) {
        const auto kernel = [&](const std::vector<Storage*>& used) {
          return [used] { // by any address: the device may have failed
            for (Storage* const storage : used) {
              CHECK(Rig::is_right(*storage));
            }
            std::memset(used.front()->ptr, ++used.front()->content, used.front()->bytes);
          };
        };
        rig.run(20, all, true, kernel(all), /*in_place_ok=*/true); // more than the budget
        for (Storage* const storage : all) {
          rig.run(2, {storage}, true, kernel({storage}));
        }
        if (const auto wrong = rig.engine.check()) {
          harness::fail(__FILE__, __LINE__, std::string(call) + " " + std::to_string(nth) + ": " + *wrong);
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
