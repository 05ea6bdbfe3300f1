#include "residency/policy/schedule.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "residency/policy/usage.h"

namespace torch_uvm::scheduling {

namespace {

/// Early write-backs are made if they shorten the prediction to this part.
constexpr double kEarlyPays = 0.98;
constexpr double kNoLonger = 1 + 1e-9; // sums of durations in another order are rounded

} // namespace

std::vector<std::size_t> base_usage(const Schedule& schedule) {
  const Iteration& iteration = schedule.iteration;
  const std::uint32_t size = iteration.size();
  std::vector<std::int64_t> change(size + 1, 0);
  std::vector<std::size_t> usage(size, 0);
  const auto add = [&](std::uint32_t begin, std::uint32_t count, std::size_t bytes) {
    for (std::uint32_t rest = count; rest > 0;) {
      const std::uint32_t here = std::min(rest, size - begin);
      change[begin] += static_cast<std::int64_t>(bytes);
      change[begin + here] -= static_cast<std::int64_t>(bytes);
      begin = 0;
      rest -= here;
    }
  };
  for (std::uint32_t use = 0; use < iteration.uses.size(); ++use) {
    const Use& it = iteration.uses[use];
    const Value& value = iteration.values[it.value];
    if (value.pinned || schedule.in_place[use]) {
      continue;
    }
    if (schedule.evicted_after[use] || it.distance == 0) {
      add(it.op, 1, value.bytes);
    } else if (it.next != kNone) {
      add(it.op, it.distance, value.bytes); // the next use adds its own
    } else {
      // Until it is freed. A value that is never freed is replaced by that of the next iteration.
      add(it.op, it.distance == kNone ? size : it.distance + 1, value.bytes);
    }
  }
  std::int64_t level = 0;
  for (std::uint32_t op = 0; op < size; ++op) {
    level += change[op];
    usage[op] = static_cast<std::size_t>(level) + iteration.ops[op].workspace;
  }
  return usage;
}

void place_fetches(Schedule& schedule, std::size_t capacity, std::span<const std::uint32_t> most_ahead) {
  const Iteration& iteration = schedule.iteration;
  const std::uint32_t size = iteration.size();
  Usage usage(base_usage(schedule));
  std::vector<std::vector<Fetch>> asked(size); // by operator
  std::vector<std::uint32_t> returning; // uses after which a value is evicted and then needed on the device again
  for (std::uint32_t use = 0; use < iteration.uses.size(); ++use) {
    const std::uint32_t next = iteration.uses[use].next;
    if (schedule.evicted_after[use] && next != kNone && !schedule.in_place[next]) {
      returning.push_back(use);
    }
  }
  std::stable_sort(returning.begin(), returning.end(), [&](std::uint32_t left, std::uint32_t right) {
    return iteration.uses[iteration.uses[left].next].op < iteration.uses[iteration.uses[right].next].op;
  });
  const auto bytes_of = [&](std::uint32_t use) {
    return static_cast<std::int64_t>(iteration.values[iteration.uses[use].value].bytes);
  };
  /// How many of `count` operators before `end` have room for the value.
  const auto fits = [&](std::uint32_t use, std::uint32_t end, std::uint32_t count) {
    return usage.fits_before(end, count, static_cast<std::int64_t>(capacity) - bytes_of(use));
  };
  const auto take = [&](std::uint32_t use, std::uint32_t end, std::uint32_t count) {
    usage.add((end + size - count) % size, count, bytes_of(use));
  };
  std::vector<std::uint32_t> ahead; // by entry of `returning`: operators between the prefetch and the use
  for (const std::uint32_t use : returning) {
    const std::uint32_t need = iteration.uses[iteration.uses[use].next].op;
    const std::uint32_t room = fits(use, need, iteration.uses[use].distance - 1);
    ahead.push_back(most_ahead.empty() ? room : std::min(room, most_ahead[use]));
    take(use, need, ahead.back());
  }
  schedule.fetches.clear();
  for (std::size_t at = 0; at < returning.size(); ++at) {
    const std::uint32_t use = returning[at], need = iteration.uses[iteration.uses[use].next].op;
    const std::uint32_t begin = (need + size - ahead[at]) % size, rest = iteration.uses[use].distance - 1 - ahead[at];
    if (!schedule.in_place[use] && fits(use, begin, rest) == rest) {
      take(use, begin, rest);
      schedule.evicted_after[use] = false;
      continue;
    }
    const std::uint32_t issue = (begin + size - 1) % size;
    schedule.fetches.push_back({iteration.uses[use].value, issue, need});
    asked[issue].push_back(schedule.fetches.back());
  }
  schedule.fetch = {};
  schedule.retire = {};
  schedule.write_back = {};
  for (std::uint32_t op = 0; op < size; ++op) {
    // They are in order of need from the iteration's start. Sort by distance from `op`, which wraps around.
    std::stable_sort(asked[op].begin(), asked[op].end(), [&](const Fetch& left, const Fetch& right) {
      return (left.need + size - op - 1) % size < (right.need + size - op - 1) % size;
    });
    for (const Fetch& fetch : asked[op]) {
      schedule.fetch.push(fetch.value);
    }
    schedule.fetch.close_list();
    for (std::uint32_t use = iteration.use_begin[op]; use < iteration.use_begin[op + 1]; ++use) {
      if (schedule.evicted_after[use]) { // what stays on the host is on the device until a new schedule has caught up
        schedule.retire.push(iteration.uses[use].value);
      }
    }
    schedule.retire.close_list();
    schedule.write_back.close_list();
  }
}

void write_back_early(Schedule& schedule) {
  const Iteration& iteration = schedule.iteration;
  std::vector<std::vector<std::uint32_t>> written(iteration.size()); // by operator
  for (const std::vector<std::uint32_t>& uses : iteration.uses_of) {
    // Twice around, since the last write before an eviction may be in the iteration before.
    std::uint32_t last_write = kNone;
    for (std::size_t at = 0; at < 2 * uses.size(); ++at) {
      const std::uint32_t use = uses[at % uses.size()];
      const Use& it = iteration.uses[use];
      if (!schedule.in_place[use] && (it.writes || it.is_creation)) {
        last_write = it.op;
      }
      if (!schedule.evicted_after[use]) {
        continue;
      }
      if (at >= uses.size() && last_write != kNone && last_write != it.op) {
        written[last_write].push_back(it.value);
      }
      last_write = kNone; // the host has the bytes until the next write
    }
  }
  schedule.write_back = {};
  for (const std::vector<std::uint32_t>& values : written) {
    for (const std::uint32_t value : values) {
      schedule.write_back.push(value);
    }
    schedule.write_back.close_list();
  }
}

std::size_t capacity_of(const Iteration& iteration, const PolicyOptions& options) {
  std::size_t capacity = options.budget > options.reserve ? options.budget - options.reserve : 0;
  for (const Value& value : iteration.values) {
    if (value.pinned) {
      capacity -= std::min(capacity, value.bytes);
    }
  }
  return capacity;
}

Schedule make_schedule(Iteration iteration, const PolicyOptions& options) {
  Schedule schedule;
  schedule.iteration = std::move(iteration);
  const std::size_t capacity = capacity_of(schedule.iteration, options);
  choose_evictions(schedule, options, capacity);
  place_fetches(schedule, capacity);
  write_back_early(schedule);
  return schedule;
}

void choose_fastest(Schedule& schedule, const PolicyOptions& options) {
  const std::size_t capacity = capacity_of(schedule.iteration, options);
  std::optional<Decisions> late, early;
  const auto keep_faster = [&](std::optional<Decisions>& best) {
    schedule.predicted_ms = predict_ms(schedule, options.rates, capacity);
    if (!best || schedule.predicted_ms < best->predicted_ms) {
      best = schedule;
    }
  };
  const auto try_both = [&] {
    keep_faster(late);
    write_back_early(schedule);
    keep_faster(early);
  };
  choose_evictions(schedule, options, capacity);
  place_fetches(schedule, capacity);
  try_both();
  double in_core_ms = 0;
  for (const Iteration::Op& op : schedule.iteration.ops) {
    in_core_ms += static_cast<double>(op.ms);
  }
  if (late->predicted_ms <= in_core_ms * kNoLonger) { // no other one can be faster
    static_cast<Decisions&>(schedule) = std::move(*late);
    return;
  }
  for (const GapRule rule : {GapRule::kMostExcess, GapRule::kFewest, GapRule::kStay}) {
    choose_evictions_in_time(schedule, options, capacity, rule);
    place_fetches(schedule, capacity, latest_fetches(schedule, options.rates));
    try_both();
  }
  const bool pays = early->predicted_ms < kEarlyPays * late->predicted_ms;
  static_cast<Decisions&>(schedule) = std::move(pays ? *early : *late);
}

} // namespace torch_uvm::scheduling
