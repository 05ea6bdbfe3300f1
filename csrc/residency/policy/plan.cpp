#include "residency/policy/plan.h"

#include <algorithm>
#include <numeric>

#include "residency/policy/usage.h"

namespace torch_uvm::planning {

namespace {

/// Device bytes in use during each operator, without prefetches.
std::vector<std::size_t> base_usage(const Plan& plan) {
  const Lap& lap = plan.lap;
  const std::uint32_t size = lap.size();
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
  for (std::uint32_t event = 0; event < lap.events.size(); ++event) {
    const Event& it = lap.events[event];
    const Part& part = lap.parts[it.part];
    if (part.held || plan.in_place[event]) {
      continue;
    }
    if (plan.leaves[event] || it.distance == 0) {
      add(it.op, 1, part.bytes);
    } else if (it.next != kNone) {
      add(it.op, it.distance, part.bytes); // the next use adds its own
    } else {
      // Until it is freed. A value that is never freed is replaced by that of the next iteration.
      add(it.op, it.distance == kNone ? size : it.distance + 1, part.bytes);
    }
  }
  std::int64_t level = 0;
  for (std::uint32_t op = 0; op < size; ++op) {
    level += change[op];
    usage[op] = static_cast<std::size_t>(level) + lap.ops[op].workspace;
  }
  return usage;
}

} // namespace

void schedule(Plan& plan, std::size_t capacity) {
  const Lap& lap = plan.lap;
  const std::uint32_t size = lap.size();
  Usage usage(base_usage(plan));
  std::vector<std::vector<Fetch>> asked(size); // by operator
  std::vector<std::uint32_t> returning; // uses after which a value is evicted and then needed on the device again
  for (std::uint32_t event = 0; event < lap.events.size(); ++event) {
    const std::uint32_t next = lap.events[event].next;
    if (plan.leaves[event] && next != kNone && !plan.in_place[next]) {
      returning.push_back(event);
    }
  }
  std::stable_sort(returning.begin(), returning.end(), [&](std::uint32_t left, std::uint32_t right) {
    return lap.events[lap.events[left].next].op < lap.events[lap.events[right].next].op;
  });
  plan.fetches.clear();
  for (const std::uint32_t event : returning) {
    const Event& it = lap.events[event];
    const auto bytes = static_cast<std::int64_t>(lap.parts[it.part].bytes);
    const std::uint32_t need = lap.events[it.next].op;
    const std::uint32_t between = it.distance - 1;
    const std::uint32_t ahead = usage.fits_before(need, between, static_cast<std::int64_t>(capacity) - bytes);
    usage.add((need + size - ahead) % size, ahead, bytes);
    if (ahead == between && !plan.in_place[event]) {
      plan.leaves[event] = false;
      continue;
    }
    const std::uint32_t issue = (need + 2 * size - ahead - 1) % size;
    plan.fetches.push_back({it.part, issue, need});
    asked[issue].push_back(plan.fetches.back());
  }
  plan.fetch = {};
  plan.retire = {};
  for (std::uint32_t op = 0; op < size; ++op) {
    // They are in order of need from the iteration's start. Sort by distance from `op`, which wraps around.
    std::stable_sort(asked[op].begin(), asked[op].end(), [&](const Fetch& left, const Fetch& right) {
      return (left.need + size - op - 1) % size < (right.need + size - op - 1) % size;
    });
    for (const Fetch& fetch : asked[op]) {
      plan.fetch.push(fetch.part);
    }
    plan.fetch.close_list();
    for (std::uint32_t event = lap.event_begin[op]; event < lap.event_begin[op + 1]; ++event) {
      if (plan.leaves[event] && !plan.in_place[event]) {
        plan.retire.push(lap.events[event].part);
      }
    }
    plan.retire.close_list();
  }
}

Plan make_plan(Lap lap, const PolicyOptions& options) {
  Plan plan;
  plan.lap = std::move(lap);
  std::size_t capacity = options.budget > options.reserve ? options.budget - options.reserve : 0;
  for (const Part& part : plan.lap.parts) {
    if (part.held) {
      capacity -= std::min(capacity, part.bytes);
    }
  }
  choose_what_leaves(plan, options, capacity);
  schedule(plan, capacity);
  return plan;
}

} // namespace torch_uvm::planning
