// Storages counted by where they were made: each comes and goes once, and what crossed the link adds up.
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "harness.h"
#include "residency/trace/origins.h"
#include "residency_rig.h"

namespace {

using namespace residency;

std::atomic<Origin> here{1};
std::atomic<bool> probing{false};
std::atomic<bool> may_go_on{false};

Origin probe() noexcept {
  return here.load();
}

Origin slow_probe() noexcept {
  probing = true;
  while (!may_go_on) {
    std::this_thread::yield();
  }
  return 5;
}

struct Asked {
  Asked() {
    Origins::get().start(&probe);
  }
  ~Asked() {
    Origins::get().stop();
  }
};

const OriginFigures* find(const std::vector<OriginFigures>& figures, Origin origin, std::size_t bytes) {
  for (const OriginFigures& it : figures) {
    if (it.origin == origin && it.bytes == bytes) {
      return &it;
    }
  }
  return nullptr;
}

TEST(nobody_asks_at_first) {
  CHECK(!Origins::get().asked());
  int block = 0;
  Origins::get().made(&block, 100);
  CHECK(Origins::get().figures().empty());
  CHECK(Origins::get().take(&block) == 0);
}

TEST(storages_of_a_line_and_a_size_are_counted_together) {
  const Asked asked;
  Origins& origins = Origins::get();
  int blocks[4] = {};
  here = 7;
  origins.made(&blocks[0], 100);
  origins.made(&blocks[1], 100);
  origins.made(&blocks[2], 200);
  here = 8;
  origins.made(&blocks[3], 100);
  origins.gone(&blocks[0]); // with no record
  CHECK(origins.take(&blocks[1]) == 7);
  CHECK(origins.take(&blocks[1]) == 0); // its record has it
  origins.gone(&blocks[1]); // so this is nobody's
  origins.gone(Origin{7}, 200);
  const auto figures = origins.figures();
  CHECK(figures.size() == 3);
  const OriginFigures* const both = find(figures, 7, 100);
  CHECK(both != nullptr && both->made == 2 && both->alive == 1 && both->most_alive == 2);
  const OriginFigures* const large = find(figures, 7, 200);
  CHECK(large != nullptr && large->made == 1 && large->alive == 0 && large->most_alive == 1);
  CHECK(find(figures, 8, 100) != nullptr);
}

TEST(what_crosses_the_link_adds_up_to_what_the_engine_has_counted) {
  Rig rig;
  const Asked asked;
  const ResidencyStatistics before = rig.engine.statistics();
  train(rig, 8, 6);
  const ResidencyStatistics now = rig.engine.statistics();
  OriginFigures sum;
  for (const OriginFigures& it : Origins::get().figures()) {
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

TEST(rows_are_bounded_and_what_has_none_is_counted_together) {
  const Asked asked;
  constexpr std::size_t kMany = 10000;
  for (std::size_t bytes = 1; bytes <= kMany; ++bytes) {
    Origins::get().moved(TransferKind::kFetch, 3, bytes);
  }
  const auto figures = Origins::get().figures();
  CHECK(figures.size() < kMany);
  std::int64_t counted = 0;
  for (const OriginFigures& it : figures) {
    counted += it.moves[0];
  }
  CHECK_EQ(counted, static_cast<std::int64_t>(kMany));
  const OriginFigures* const rest = find(figures, 0, 0);
  CHECK(rest != nullptr && rest->moves[0] > 1);
}

TEST(who_stops_waits_for_a_probe_that_is_under_way) {
  Origins& origins = Origins::get();
  origins.start(&slow_probe);
  int block = 0;
  std::thread maker([&] { origins.made(&block, 100); });
  while (!probing) {
    std::this_thread::yield();
  }
  std::atomic<bool> stopped{false};
  std::thread stopper([&] {
    origins.stop();
    stopped = true;
  });
  while (origins.asked()) {
    std::this_thread::yield();
  }
  CHECK(!stopped);
  may_go_on = true;
  maker.join();
  stopper.join();
  const auto figures = origins.figures(); // which stay
  CHECK(figures.size() == 1 && figures[0].origin == 5 && figures[0].made == 1);
  CHECK(origins.take(&block) == 0);
  origins.start(&probe);
  CHECK(origins.figures().empty()); // counted anew
  origins.stop();
}

TEST(threads_make_and_free_at_once) {
  const Asked asked;
  here = 9;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([] {
      std::vector<char> blocks(64);
      for (int round = 0; round < 200; ++round) {
        for (char& block : blocks) {
          Origins::get().made(&block, 100);
        }
        for (char& block : blocks) {
          if (round % 2 == 0) {
            Origins::get().gone(&block);
          } else {
            Origins::get().gone(Origins::get().take(&block), 100);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const auto figures = Origins::get().figures();
  CHECK(figures.size() == 1 && figures[0].made == 4 * 64 * 200 && figures[0].alive == 0);
  CHECK(figures[0].most_alive >= 64 && figures[0].most_alive <= 256);
}

} // namespace

HARNESS_MAIN()
