// Schedules of steps that are small enough to be worked out by hand: exact lists.
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "harness.h"
#include "residency/policy/schedule.h"
#include "residency/policy/usage.h"
#include "residency_script.h"

using namespace torch_uvm;
using namespace torch_uvm::scheduling;
using script::options;
using script::Script;

namespace {

bool is_alive(StorageId /*storage*/) {
  return true;
}

/// Prints one of the schedule's lists as "op:storage op:b<creating operator> ...".
std::string shown(const Schedule& schedule, const Lists& lists) {
  std::string text;
  for (std::uint32_t op = 0; op < schedule.iteration.size(); ++op) {
    for (const std::uint32_t value : lists[op]) {
      const Value& it = schedule.iteration.values[value];
      text += (text.empty() ? "" : " ") + std::to_string(op) + ':' +
              (it.created_at == kNone ? std::to_string(it.persistent) : 'b' + std::to_string(it.created_at));
    }
  }
  return text;
}

std::string in_place(const Schedule& schedule) {
  std::string text;
  for (std::uint32_t use = 0; use < schedule.iteration.uses.size(); ++use) {
    if (schedule.in_place[use]) {
      const Use& it = schedule.iteration.uses[use];
      text += (text.empty() ? "" : " ") + std::to_string(it.op) + ':' +
              std::to_string(schedule.iteration.values[it.value].persistent);
    }
  }
  return text;
}

/// Parameters are used by forward and by the optimizer, and their optimizer state by the optimizer only: 6 operators.
Script six_updates() {
  Script script({{1, 8}, {2, 8}, {3, 8}, {4, 8}}); // two parameters, and the optimizer state of each
  for (int iteration = 0; iteration < 6; ++iteration) {
    script.op(10, {{1, false}}, {{101, 8}}); // 0
    script.op(11, {{2, false}, {101, false}}, {{102, 8}}, {101}); // 1
    script.op(12, {{2, false}, {102, false}}, {{103, 8}}, {102}); // 2: computes the gradients
    script.op(13, {{1, false}, {103, false}}, {{104, 8}}); // 3
    script.op(14, {{1, true}, {103, false}, {3, true}}, {}, {103}, true); // 4
    script.op(15, {{2, true}, {104, false}, {4, true}}, {}, {104}, true); // 5
  }
  return script;
}

} // namespace

TEST(usage_adds_to_ranges_and_finds_where_a_bound_is_exceeded) {
  Usage usage({1, 2, 3, 4, 5, 6, 7});
  CHECK_EQ(usage.fits_before(7, 7, 7), 7U);
  CHECK_EQ(usage.fits_before(3, 3, 2), 0U);
  CHECK_EQ(usage.fits_before(2, 5, 5), 2U); // wraps around: 2, 1, then 7
  usage.add(5, 4, -4); // becomes 5, 6, 0, 1
  CHECK_EQ(usage.fits_before(2, 7, 3), 4U); // becomes -2, -3, 3, 2, then 5
  usage.add(0, 7, 10);
  CHECK_EQ(usage.fits_before(7, 7, 13), 2U);
  CHECK_EQ(usage.fits_before(5, 0, 0), 0U);
}

/// Four weights of 4 in a row, forward only, with room for three. The weight just used has the farthest next use. The
/// evicted weight is the one whose fetch is due last.
TEST(weights_read_in_turn_are_evicted_by_farthest_next_use) {
  Script script({{1, 4}, {2, 4}, {3, 4}, {4, 4}});
  for (int iteration = 0; iteration < 12; ++iteration) {
    for (StorageId weight = 1; weight <= 4; ++weight) {
      script.op(weight, {{weight, false}});
    }
  }
  CHECK_EQ(script.log().candidate(), 4U);
  CHECK(script.log().repeats(4, is_alive));
  const Schedule roomy = make_schedule(make_iteration(script.log(), 4), options(16));
  CHECK_EQ(shown(roomy, roomy.retire), "");
  CHECK_EQ(shown(roomy, roomy.fetch), "");

  // With room for three, one weight is absent at any time. In the long run every schedule needs at least 4/3 fetches
  // per iteration; a schedule that is the same in each iteration needs two.
  const Schedule schedule = make_schedule(make_iteration(script.log(), 4), options(12));
  CHECK_EQ(schedule.fetches.size(), 2U);
}

/// Layers and their saved activations. The earliest layer's activation is evicted, because its backward is last.
TEST(the_activation_used_last_by_backward_is_evicted) {
  Script script({});
  for (int iteration = 0; iteration < 4; ++iteration) {
    script.op(10, {}, {{101, 10}}); // 0: forward 1 saves b0
    script.op(11, {{101, false}}, {{102, 10}}); // 1: forward 2 saves b1
    script.op(12, {{102, false}}, {{103, 10}}); // 2: forward 3 saves b2
    script.op(13, {{103, false}}, {{104, 2}}, {103}); // 3: backward 3, b3
    script.op(14, {{102, false}, {104, true}}, {}, {102}); // 4: backward 2
    script.op(15, {{101, false}, {104, true}}, {}, {101, 104}); // 5: backward 1
  }
  CHECK_EQ(script.log().candidate(), 6U);
  CHECK(script.log().repeats(6, is_alive));
  const Schedule all = make_schedule(make_iteration(script.log(), 6), options(32));
  CHECK_EQ(shown(all, all.retire), "");
  // Room for two activations and the gradient: b0 is evicted after its use in 1 and fetched when there is room again,
  // after 3.
  const Schedule schedule = make_schedule(make_iteration(script.log(), 6), options(22));
  CHECK_EQ(shown(schedule, schedule.retire), "1:b0");
  CHECK_EQ(shown(schedule, schedule.fetch), "3:b0");
  // Room for one activation and the gradient: each is evicted after its use, and fetched when the previous one has been
  // freed. Operators 1 and 2 use two activations, which exceeds the budget inevitably.
  const Schedule tight = make_schedule(make_iteration(script.log(), 6), options(12));
  CHECK_EQ(shown(tight, tight.retire), "1:b0 2:b1");
  CHECK_EQ(shown(tight, tight.fetch), "3:b1 4:b0");
}

TEST(optimizer_state_that_does_not_fit_is_used_in_place) {
  Script script = six_updates();
  CHECK_EQ(script.log().candidate(), 6U);
  const Schedule schedule = make_schedule(make_iteration(script.log(), 6), options(32));
  CHECK_EQ(in_place(schedule), "4:3 5:4");
  CHECK_EQ(shown(schedule, schedule.fetch), "");
  CHECK_EQ(shown(schedule, schedule.retire), "4:3 5:4"); // once, and then it stays on the host
  // Without use in place it has to be fetched and evicted.
  const Schedule fetched = make_schedule(make_iteration(script.log(), 6), options(32, false));
  CHECK_EQ(in_place(fetched), "");
  CHECK(!fetched.fetches.empty());
  // If everything fits, nothing is used in place.
  const Schedule roomy = make_schedule(make_iteration(script.log(), 6), options(48));
  CHECK_EQ(in_place(roomy), "");
}

/// A schedule of several iterations, as of a whole run that is repeated, chooses as the schedule of one.
TEST(optimizer_state_is_used_in_place_whatever_the_length_of_the_schedule) {
  const Script script = six_updates();
  const Schedule schedule = make_schedule(make_iteration(script.log(), 18), options(32));
  CHECK_EQ(in_place(schedule), "4:3 5:4 10:3 11:4 16:3 17:4");
  CHECK(schedule.fetches.empty());
}

TEST(a_pinned_storage_stays_and_uses_the_budget) {
  Script script({{1, 8}, {2, 8}, {3, 8}});
  for (int iteration = 0; iteration < 8; ++iteration) {
    script.op(10, {{1, false}});
    script.op(11, {{2, false}});
    script.op(12, {{3, false}});
  }
  Iteration iteration = make_iteration(script.log(), 3);
  iteration.values[*iteration.value_of.find(1)].pinned = true;
  const Schedule schedule = make_schedule(iteration, options(16));
  CHECK_EQ(shown(schedule, schedule.retire), "1:2 2:3");
  CHECK_EQ(shown(schedule, schedule.fetch), "1:3 2:2");
}

/// Storage 1 would have room all the way from its use to the next one, but then the fetch of storage 2 has none until
/// its use, and comes late.
TEST(fetches_have_their_room_before_evictions_are_taken_back) {
  Script script({{1, 8}, {2, 8}, {3, 8}});
  for (int iteration = 0; iteration < 4; ++iteration) {
    script.op(10, {{2, false}, {3, false}}); // 0
    script.op(11, {{3, false}}); // 1
    script.op(12, {{1, false}, {3, false}}); // 2
    script.op(13, {{3, false}}); // 3
    script.op(14, {{3, false}}, {{101, 8}}); // 4
    script.op(15, {{3, false}, {101, false}}, {}, {101}); // 5
    script.op(16, {{2, false}, {3, false}}); // 6
    script.op(17, {{3, false}}); // 7
  }
  Schedule schedule;
  schedule.iteration = make_iteration(script.log(), 8);
  for (Iteration::Op& op : schedule.iteration.ops) {
    op.ms = 4;
  }
  for (const Use& use : schedule.iteration.uses) {
    const StorageId storage = schedule.iteration.values[use.value].persistent;
    schedule.evicted_after.push_back((storage == 1 && use.op == 2) || (storage == 2 && use.op == 0));
    schedule.in_place.push_back(false);
  }
  place_fetches(schedule, 24, latest_fetches(schedule, {1, 1, 1}));
  CHECK_EQ(shown(schedule, schedule.retire), "2:1"); // storage 2 stays, too
  CHECK_EQ(shown(schedule, schedule.fetch), "7:1");
  place_fetches(schedule, 32, latest_fetches(schedule, {1, 1, 1}));
  CHECK_EQ(shown(schedule, schedule.retire), ""); // there is room for all
}

/// A temporary that lives across the end of an iteration, such as a gradient that the next step frees at its beginning.
TEST(a_value_may_live_across_the_end_of_an_iteration) {
  Script script(std::map<StorageId, std::size_t>{{1, 4}});
  script.op(10, {{1, false}}, {{101, 4}});
  for (int iteration = 0; iteration < 9; ++iteration) {
    script.op(11, {{101, false}}, {}, {101});
    script.op(12, {{1, false}});
    script.op(10, {{1, false}}, {{101, 4}});
  }
  CHECK_EQ(script.log().candidate(), 3U);
  const Iteration iteration = make_iteration(script.log(), 3);
  CHECK_EQ(iteration.values.size(), 2U);
  for (const Value& value : iteration.values) {
    if (value.created_at != kNone) {
      CHECK_EQ(value.created_at, 2U);
      CHECK_EQ(value.freed_at, 0U);
    }
  }
}

/// A cache that grows: each iteration makes a larger one from the one before, which is freed an operator later.
TEST(storages_that_outlive_an_iteration_take_turns_in_one_of_two) {
  Script script(std::map<StorageId, std::size_t>{{1, 4}});
  script.op(10, {{1, false}}, {{100, 8}});
  for (int iteration = 0; iteration < 8; ++iteration) {
    const StorageId older = 100 + iteration % 2, newer = 101 - iteration % 2;
    script.op(11, {{1, false}});
    script.op(12, {{older, false}}, {{newer, 8}});
    script.op(13, {{newer, false}}, {}, {older});
  }
  CHECK_EQ(script.log().candidate(), 3U);
  CHECK_EQ(bytes_that_outlive(script.log(), 3), std::size_t{8});
  const Iteration iteration = make_iteration(script.log(), 6, 3);
  CHECK_EQ(iteration.steps, 2U);
  CHECK_EQ(iteration.values.size(), 3U); // the parameter and two caches
  for (std::uint32_t value = 0; value < iteration.values.size(); ++value) {
    const Value& it = iteration.values[value];
    if (it.created_at == kNone) {
      continue;
    }
    CHECK_EQ(it.freed_at, (it.created_at + 4) % 6);
    std::vector<std::uint32_t> distances; // from its creation, its first use and its last one
    for (const std::uint32_t use : iteration.uses_of[value]) {
      distances.push_back(iteration.uses[use].distance);
    }
    CHECK(distances == std::vector<std::uint32_t>({1, 2, 1}));
  }
  // Both caches of an operator have to fit: the parameter goes, twice.
  const Schedule schedule = make_schedule(iteration, options(16));
  CHECK_EQ(shown(schedule, schedule.retire), "0:1 3:1");
}

TEST(storages_that_end_before_their_counterparts_begin_do_not_outlive_an_iteration) {
  Script script(std::map<StorageId, std::size_t>{{1, 4}});
  script.op(10, {{1, false}}, {{101, 4}});
  for (int iteration = 0; iteration < 9; ++iteration) {
    script.op(11, {{101, false}}, {}, {101});
    script.op(10, {{1, false}}, {{101, 4}});
  }
  CHECK_EQ(bytes_that_outlive(script.log(), 2), std::size_t{0});
}

/// `batch = next(batches).to(device)`: the old one is freed once the new one is made, and takes room until then.
TEST(a_batch_takes_room_until_the_next_one_is_made) {
  Script script({{1, 8}, {2, 8}, {100, 8}});
  for (StorageId batch = 100; batch < 106; ++batch) {
    script.op(10, {{batch, false}});
    script.op(11, {{1, true}});
    script.op(12, {{2, true}});
    script.op(13, {}, {{batch + 1, 8}}, {batch});
  }
  const Schedule schedule = make_schedule(make_iteration(script.log(), 4), options(16));
  CHECK_EQ(shown(schedule, schedule.retire), "0:b3 1:1");
}

TEST(identical_layers_are_not_an_iteration) {
  Script script({{1, 4}, {2, 4}, {3, 4}, {4, 4}});
  for (int iteration = 0; iteration < 6; ++iteration) {
    // each operator has the same key and the same distance to the last use
    for (StorageId weight = 1; weight <= 4; ++weight) {
      script.op(7, {{weight, false}});
    }
  }
  CHECK_EQ(script.log().candidate(), 1U); // according to the hashes alone
  CHECK(!script.log().repeats(1, is_alive));
  CHECK_EQ(script.log().candidate(), 4U);
  CHECK(script.log().repeats(4, is_alive));
}

HARNESS_MAIN()
