// The engine over storages that are address ranges: an address stays equal for life, and has its bytes when they are
// used.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <random>
#include <vector>

#include "child_signal.h"
#include "ranges_rig.h"

using namespace torch_uvm;
using namespace ranges_rig;

TEST(an_address_is_equal_for_life) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    std::vector<Storage*> all;
    for (int count = 0; count < 10; ++count) {
      all.push_back(&rig.make(count % 3 == 0 ? kBytes - 5 : kBytes));
      rig.is_well();
    }
    std::mt19937 random(7);
    for (int step = 0; step < 120; ++step) { // at first without a schedule, then with one that is no good
      Storage* const one = all[random() % all.size()];
      Storage* const other = all[random() % all.size()];
      rig.use(one == other ? std::vector{one} : std::vector{one, other}, 2 + random() % 3);
      rig.is_well();
    }
    CHECK(rig.engine.statistics().written_back.count > 20);
  }
}

TEST(steps_that_repeat_follow_a_schedule) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    std::vector<Storage*> all;
    for (int count = 0; count < 8; ++count) {
      all.push_back(&rig.make());
    }
    for (int step = 0; step < 12; ++step) {
      for (std::size_t at = 0; at < all.size(); ++at) {
        rig.use({all[at]}, 10 + at);
        rig.run(30 + at, {all[at], all[(at + 1) % all.size()]}, false, [&] { // reads only: clean evictions
          CHECK(Rig::is_right(*all[at]) && Rig::is_right(*all[(at + 1) % all.size()]));
        });
        Storage& result = rig.make(); // and temporaries
        rig.free(result);
        rig.storages.pop_back();
      }
      rig.engine.mark_step();
      rig.is_well();
    }
    const ResidencyStatistics statistics = rig.engine.statistics();
    CHECK(statistics.plan_hits > statistics.plan_misses);
    CHECK(statistics.fetched.count > 20);
  }
}

TEST(queued_work_ends_before_its_memory_goes) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    std::vector<Storage*> all;
    std::vector<std::vector<unsigned char>> results;
    for (int count = 0; count < 8; ++count) {
      all.push_back(&rig.make());
      results.emplace_back(kBytes);
    }
    for (int step = 0; step < 10; ++step) {
      for (std::size_t at = 0; at < all.size(); ++at) { // "kernels" that are not done when the operator ends
        rig.run(10 + at, {all[at]}, true, [&] { rig.runtime.zero_async(all[at]->ptr, kBytes, kStream); });
        all[at]->content = 0;
        rig.run(30 + at, {all[at]}, false,
                [&] { rig.runtime.copy_async(results[at].data(), all[at]->ptr, kBytes, kStream); });
        rig.is_well();
      }
      rig.engine.mark_step();
      rig.runtime.synchronize_stream(kStream);
      for (std::vector<unsigned char>& result : results) {
        CHECK(std::ranges::all_of(result, [](unsigned char byte) { return byte == 0; }));
        std::ranges::fill(result, 1);
      }
      for (Storage* const storage : all) {
        rig.use({storage}, 50);
      }
      for (int round = 0; round < 3; ++round) { // reads only: clean evictions
        for (std::size_t at = 0; at < all.size(); ++at) {
          rig.run(70 + at, {all[at]}, false,
                  [&] { rig.runtime.copy_async(results[at].data(), all[at]->ptr, kBytes, kStream); });
          rig.is_well();
        }
      }
      rig.runtime.synchronize_stream(kStream);
    }
  }
}

TEST(an_access_to_an_evicted_storage_faults) {
  Rig rig;
  Storage& storage = rig.make();
  rig.engine.evict_after_operators(true);
  rig.use({&storage});
  rig.engine.evict_after_operators(false);
  CHECK(storage.block == nullptr && storage.ptr == storage.address);
  rig.memory.empty_cache(); // waits for the write-back
  CHECK_EQ(signal_of([&] { static_cast<void>(*static_cast<volatile unsigned char*>(storage.ptr)); }), SIGSEGV);
  CHECK_EQ(rig.memory.levels(Location::device(0)).reserved_bytes[0], 0);
  rig.use({&storage});
  rig.is_well();
}

TEST(an_address_that_is_asked_for_has_its_bytes) {
  for (const Seed seed : kSeeds) {
    Rig rig(seed);
    Storage& storage = rig.make();
    rig.engine.evict_after_operators(true);
    rig.use({&storage});
    rig.engine.evict_after_operators(false);
    rig.engine.materialise(storage.record);
    CHECK(storage.block != nullptr && storage.ptr == storage.address && Rig::is_right(storage));
    ++storage.content; // host code may write
    std::memset(storage.ptr, storage.content, storage.bytes);
    for (int more = 0; more < 6; ++more) {
      rig.make();
    }
    rig.use({&storage});
    rig.is_well();
  }
}

TEST(a_pinned_storage_keeps_its_memory) {
  Rig rig;
  Storage& pinned = rig.make();
  rig.evict({&pinned});
  {
    const Engine::Lock lock(rig.engine);
    CHECK(rig.engine.pin(pinned.record, kStream));
  }
  rig.press();
  CHECK(pinned.block != nullptr && pinned.ptr == pinned.address && Rig::is_right(pinned));
  {
    const Engine::Lock lock(rig.engine);
    rig.engine.unpin(pinned.record);
  }
  rig.press();
  CHECK(pinned.block == nullptr);
  rig.use({&pinned});
  rig.is_well();
}

TEST(a_nested_operator_brings_an_evicted_storage_back) {
  Rig rig;
  Storage& outer = rig.make();
  Storage& inner = rig.make();
  rig.engine.evict_after_operators(true);
  rig.use({&inner});
  rig.engine.evict_after_operators(false);
  CHECK(inner.block == nullptr);
  rig.run(5, {&outer}, false, [&] {
    Engine::Frame frame;
    {
      const Engine::Lock lock(rig.engine);
      const std::vector<Engine::Operand> operands{{inner.record, true}};
      rig.engine.begin_nested(frame, operands, rig.streams);
    }
    rig.runtime.wait_in_kernel(kStream); // as the nested kernel's launch does
    CHECK(inner.ptr == inner.address && Rig::is_right(inner));
    std::memset(inner.ptr, ++inner.content, kBytes);
    const Engine::Lock lock(rig.engine);
    rig.engine.end(frame);
  });
  rig.use({&inner, &outer});
  rig.is_well();
}

HARNESS_MAIN()
