// The allocation-site profiler: each storage is counted once when created and once when freed, and transfers add up.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "harness.h"
#include "residency/trace/allocation_sites.h"
#include "residency_rig.h"

namespace {

using namespace residency;

std::atomic<AllocationSite> here{1};
std::atomic<bool> probing{false};
std::atomic<bool> may_go_on{false};

AllocationSite probe() noexcept {
  return here.load();
}

AllocationSite slow_probe() noexcept {
  probing = true;
  while (!may_go_on) {
    std::this_thread::yield();
  }
  return 5;
}

struct Asked {
  Asked() {
    AllocationSites::get().start(&probe);
  }
  ~Asked() {
    AllocationSites::get().stop();
  }
};

const AllocationSiteFigures* find(const std::vector<AllocationSiteFigures>& figures, AllocationSite site,
                                  std::size_t bytes) {
  for (const AllocationSiteFigures& it : figures) {
    if (it.site == site && it.bytes == bytes) {
      return &it;
    }
  }
  return nullptr;
}

TEST(the_profiler_is_off_by_default) {
  CHECK(!AllocationSites::get().asked());
  int block = 0;
  AllocationSites::get().made(&block, 100);
  CHECK(AllocationSites::get().figures().empty());
  CHECK(AllocationSites::get().take(&block) == 0);
}

TEST(storages_of_one_line_and_size_share_a_row) {
  const Asked asked;
  AllocationSites& sites = AllocationSites::get();
  int blocks[4] = {};
  here = 7;
  sites.made(&blocks[0], 100);
  sites.made(&blocks[1], 100);
  sites.made(&blocks[2], 200);
  here = 8;
  sites.made(&blocks[3], 100);
  sites.gone(&blocks[0]); // freed without a record
  CHECK(sites.take(&blocks[1]) == 7);
  CHECK(sites.take(&blocks[1]) == 0); // the record has the site now
  sites.gone(&blocks[1]); // so this call counts nothing
  sites.gone(AllocationSite{7}, 200);
  const auto figures = sites.figures();
  CHECK(figures.size() == 3);
  const AllocationSiteFigures* const both = find(figures, 7, 100);
  CHECK(both != nullptr && both->made == 2 && both->alive == 1 && both->most_alive == 2);
  const AllocationSiteFigures* const large = find(figures, 7, 200);
  CHECK(large != nullptr && large->made == 1 && large->alive == 0 && large->most_alive == 1);
  CHECK(find(figures, 8, 100) != nullptr);
}

TEST(transfers_by_site_add_up_to_the_engines_statistics) {
  Rig rig;
  const Asked asked;
  const ResidencyStatistics before = rig.engine.statistics();
  train(rig, 8, 6);
  const ResidencyStatistics now = rig.engine.statistics();
  AllocationSiteFigures sum;
  for (const AllocationSiteFigures& it : AllocationSites::get().figures()) {
    for (std::size_t kind = 0; kind < 4; ++kind) {
      sum.moves[kind] += it.moves[kind];
      sum.moved_bytes[kind] += it.moved_bytes[kind];
    }
  }
  const auto same = [&](TransferKind kind, const ResidencyStatistics::Traffic& then,
                        const ResidencyStatistics::Traffic& traffic) {
    const auto index = static_cast<std::size_t>(kind);
    CHECK_EQ(sum.moves[index], traffic.count - then.count);
    CHECK_EQ(sum.moved_bytes[index], traffic.bytes - then.bytes);
  };
  CHECK(now.fetched.count > before.fetched.count && now.written_back.count > before.written_back.count);
  same(TransferKind::kFetch, before.fetched, now.fetched);
  same(TransferKind::kWriteBack, before.written_back, now.written_back);
  same(TransferKind::kDrop, before.dropped_clean, now.dropped_clean);
  same(TransferKind::kInPlace, before.used_in_place, now.used_in_place);
}

TEST(rows_are_bounded_and_the_rest_shares_one) {
  const Asked asked;
  constexpr std::size_t kMany = 10000;
  for (std::size_t bytes = 1; bytes <= kMany; ++bytes) {
    AllocationSites::get().moved(TransferKind::kFetch, 3, bytes);
  }
  const auto figures = AllocationSites::get().figures();
  CHECK(figures.size() < kMany);
  std::int64_t counted = 0;
  for (const AllocationSiteFigures& it : figures) {
    counted += it.moves[0];
  }
  CHECK_EQ(counted, static_cast<std::int64_t>(kMany));
  const AllocationSiteFigures* const rest = find(figures, 0, 0);
  CHECK(rest != nullptr && rest->moves[0] > 1);
}

TEST(stopping_waits_for_a_running_probe) {
  AllocationSites& sites = AllocationSites::get();
  sites.start(&slow_probe);
  int block = 0;
  std::thread maker([&] { sites.made(&block, 100); });
  while (!probing) {
    std::this_thread::yield();
  }
  std::atomic<bool> stopped{false};
  std::thread stopper([&] {
    sites.stop();
    stopped = true;
  });
  while (sites.asked()) {
    std::this_thread::yield();
  }
  CHECK(!stopped);
  may_go_on = true;
  maker.join();
  stopper.join();
  const auto figures = sites.figures(); // stopping keeps them
  CHECK(figures.size() == 1 && figures[0].site == 5 && figures[0].made == 1);
  CHECK(sites.take(&block) == 0);
  sites.start(&probe);
  CHECK(sites.figures().empty()); // starting clears them
  sites.stop();
}

TEST(several_threads_create_and_free_concurrently) {
  const Asked asked;
  here = 9;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([] {
      std::vector<char> blocks(64);
      for (int round = 0; round < 200; ++round) {
        for (char& block : blocks) {
          AllocationSites::get().made(&block, 100);
        }
        for (char& block : blocks) {
          if (round % 2 == 0) {
            AllocationSites::get().gone(&block);
          } else {
            AllocationSites::get().gone(AllocationSites::get().take(&block), 100);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const auto figures = AllocationSites::get().figures();
  CHECK(figures.size() == 1 && figures[0].made == 4 * 64 * 200 && figures[0].alive == 0);
  CHECK(figures[0].most_alive >= 64 && figures[0].most_alive <= 256);
}

} // namespace

HARNESS_MAIN()
