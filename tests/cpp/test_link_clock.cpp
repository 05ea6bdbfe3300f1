// Copies of both directions of a link in modelled time.
#include <algorithm>
#include <cmath>
#include <random>
#include <utility>
#include <vector>

#include "harness.h"
#include "runtime/link_clock.h"

using namespace torch_uvm;

namespace {

constexpr auto kIn = LinkClock::kToDevice;
constexpr auto kOut = LinkClock::kToHost;

bool close(double left, double right) {
  return std::abs(left - right) <= 1e-9 * std::max(1.0, std::abs(right));
}

} // namespace

TEST(a_direction_copies_one_after_the_other) {
  LinkClock link(10, 20, 25);
  CHECK_EQ(link.copy(kIn, 3, 100), 13);
  CHECK_EQ(link.copy(kIn, 0, 50), 18);
  CHECK_EQ(link.free_at(kIn), 18);
  CHECK_EQ(link.free_at(kOut), 0);
}

TEST(the_later_call_gets_what_the_earlier_one_leaves) {
  LinkClock link(10, 20, 25);
  CHECK_EQ(link.copy(kIn, 0, 100), 10);
  CHECK_EQ(link.copy(kOut, 0, 60), 4); // 25 - 10 = 15 while the other one is busy
  CHECK_EQ(link.copy(kOut, 8, 70), 12); // 30 until 10, then 20 a unit of time
  CHECK_EQ(link.copy(kIn, 9, 25), 13.5); // from 10 on: 5 until 12, then 10
}

TEST(a_gap_of_the_other_direction_is_used_at_the_full_rate) {
  LinkClock link(10, 10, 15);
  link.copy(kOut, 2, 20);
  link.copy(kOut, 6, 20);
  CHECK(close(link.copy(kIn, 0, 70), 9)); // 20, then 10 until 4, 20 until 6, 10 until 8, 10
}

TEST(a_copy_that_ends_before_the_other_direction_begins_is_not_slowed) {
  LinkClock link(10, 10, 15);
  link.copy(kOut, 50, 100);
  CHECK_EQ(link.copy(kIn, 0, 500), 50);
}

TEST(other_traffic_leaves_the_other_direction_its_rate) {
  LinkClock link(10, 10, 12);
  CHECK_EQ(link.occupy(kOut, 0, 100), 100);
  CHECK_EQ(link.copy(kIn, 0, 100), 10);
  CHECK_EQ(link.copy(kOut, 0, 10), 101); // its own direction waits
}

TEST(a_link_without_rate_for_both_still_ends_its_copies) {
  LinkClock link(16, 16, 16);
  link.copy(kIn, 0, 1600);
  CHECK(close(link.copy(kOut, 0, 160), 101 + 60.0 / 16 - 1)); // 1 a unit of time until 100, then 16
}

/// At no time do both carry more than the link does, and copies take no longer than with the least that is left.
TEST(both_directions_stay_within_the_links_rates) {
  std::mt19937 random(20);
  for (int round = 0; round < 200; ++round) {
    LinkClock link(10, 12, 16);
    const auto upto = [&](int most) { return static_cast<double>(random() % static_cast<unsigned>(most)); };
    double now = 0, moved = 0, first = -1, last = 0;
    for (int call = 0; call < 100; ++call) {
      now += upto(4);
      const auto direction = random() % 2 == 0 ? kIn : kOut;
      const double bytes = 1 + upto(100), begin = std::max(now, link.free_at(direction));
      const double end = link.copy(direction, now, bytes), alone = direction == kIn ? 10 : 12;
      CHECK(end - begin >= bytes / alone - 1e-9);
      CHECK(end - begin <= bytes / (direction == kIn ? 4 : 6) + 1e-9);
      first = first < 0 ? begin : std::min(first, begin);
      last = std::max(last, end);
      moved += bytes;
    }
    CHECK(moved <= 16 * (last - first) * (1 + 1e-9));
  }
}

TEST(years_of_one_direction_take_no_more_memory) {
  LinkClock link(10, 10, 15);
  for (int copy = 0; copy < 1'000'000; ++copy) {
    link.copy(kIn, 10.0 * copy, 10); // with gaps, so that none is merged with the one before
  }
  CHECK_EQ(link.copy(kOut, 0, 100), 10); // beside copies that are long forgotten
}

HARNESS_MAIN()
