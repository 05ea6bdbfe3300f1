// Binding of the residency policy, to make schedules from recorded traces.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "residency/engine/shares.h"
#include "residency/policy/policy.h"
#include "residency/policy/schedule.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;
using namespace scheduling;

using Made = std::pair<StorageId, std::size_t>;
/// Name, whether operands may be used in place, storages found before it, reads, writes, births, workspace, deaths,
/// steps that end after it.
using TracedOperator = std::tuple<std::string, bool, std::vector<Made>, std::vector<StorageId>, std::vector<StorageId>,
                                  std::vector<Made>, std::size_t, std::vector<StorageId>, unsigned>;

struct Followed {
  Schedule schedule;
  std::size_t first = 0; ///< the traced operator that comes first in the schedule
};

/// The schedule that the trace's operators match last.
std::optional<Followed> follow(const std::vector<TracedOperator>& operators, const PolicyOptions& options) {
  Policy policy(options);
  std::optional<Followed> followed;
  std::vector<Access> accesses;
  for (std::size_t at = 0; at < operators.size(); ++at) {
    const auto& [name, in_place_ok, found, reads, writes, births, workspace, deaths, steps] = operators[at];
    for (const auto& [storage, bytes] : found) {
      policy.created(storage, bytes);
    }
    accesses.clear();
    for (const StorageId storage : reads) {
      accesses.push_back({storage, false});
    }
    for (const StorageId storage : writes) {
      accesses.push_back({storage, true});
    }
    const std::uint64_t made = policy.counters().schedules_made;
    policy.begin(std::hash<std::string>{}(name), accesses, in_place_ok);
    policy.end(births, workspace);
    const auto [schedule, position] = policy.schedule();
    const bool is_new = position == 0 && policy.counters().schedules_made != made; // of the operators before this one
    if (schedule != nullptr && (is_new || position + 1 == schedule->iteration.size())) {
      const std::size_t end = is_new ? at : at + 1;
      if (end >= schedule->iteration.size()) {
        followed = Followed{*schedule, end - schedule->iteration.size()};
      }
    }
    for (const StorageId storage : deaths) {
      policy.freed(storage);
    }
    for (unsigned step = 0; step < steps; ++step) {
      policy.mark_step();
    }
  }
  return followed;
}

std::vector<std::vector<std::uint32_t>> nested(const Lists& lists, std::uint32_t operators) {
  std::vector<std::vector<std::uint32_t>> all;
  for (std::uint32_t op = 0; op < operators; ++op) {
    all.emplace_back(lists[op].begin(), lists[op].end());
  }
  return all;
}

/// The latest operator that has changed the device's copy of what is evicted after a use; kNone: none since it was
/// fetched.
std::uint32_t last_write(const Schedule& schedule, std::uint32_t evicted_after) {
  const Iteration& iteration = schedule.iteration;
  const std::vector<std::uint32_t>& uses = iteration.uses_of[iteration.uses[evicted_after].value];
  const auto last = static_cast<std::size_t>(std::ranges::find(uses, evicted_after) - uses.begin());
  for (std::size_t back = 0; back < uses.size(); ++back) {
    const std::uint32_t use = uses[(last + uses.size() - back) % uses.size()];
    if (back > 0 && schedule.evicted_after[use] && !schedule.in_place[use]) {
      break;
    }
    if (!schedule.in_place[use] && (iteration.uses[use].writes || iteration.uses[use].is_creation)) {
      return iteration.uses[use].op;
    }
  }
  return kNone;
}

/// \param whole with all values, uses and transfers
py::dict as_dict(const Followed& followed, std::size_t capacity, bool whole) {
  const Schedule& schedule = followed.schedule;
  const Iteration& iteration = schedule.iteration;
  py::dict dict;
  dict["first"] = followed.first;
  dict["operators"] = iteration.size();
  dict["steps"] = iteration.steps;
  dict["capacity"] = capacity;
  dict["predicted_ms"] = schedule.predicted_ms;
  py::list uses, evictions, fetches, values, workspaces;
  std::size_t in_place = 0, out = 0, into = 0;
  for (std::uint32_t at = 0; at < iteration.uses.size(); ++at) {
    const Use& use = iteration.uses[at];
    const std::size_t bytes = iteration.values[use.value].bytes;
    in_place += schedule.in_place[at] ? bytes : 0;
    if (schedule.evicted_after[at] && !schedule.in_place[at]) { // of what is on the device
      const std::uint32_t written = last_write(schedule, at);
      out += written == kNone ? 0 : bytes;
      if (whole) {
        evictions.append(
            py::make_tuple(use.value, use.op, written == kNone ? py::none() : py::object(py::int_(written))));
      }
    }
    if (whole) {
      uses.append(py::make_tuple(use.value, use.op, use.writes, use.is_creation));
    }
  }
  for (const Fetch& fetch : schedule.fetches) {
    into += iteration.values[fetch.value].bytes;
    if (whole) {
      fetches.append(py::make_tuple(fetch.value, fetch.issue));
    }
  }
  dict["bytes"] = py::make_tuple(into, out, in_place);
  if (!whole) {
    return dict;
  }
  for (const Value& value : iteration.values) {
    values.append(py::make_tuple(value.bytes, value.created_at == kNone));
  }
  for (const Iteration::Op& op : iteration.ops) {
    workspaces.append(op.workspace);
  }
  dict["values"] = values;
  dict["uses"] = uses;
  dict["in_place"] = schedule.in_place;
  dict["workspaces"] = workspaces;
  dict["frees"] = nested(iteration.frees, iteration.size());
  dict["evictions"] = evictions;
  dict["write_backs"] = nested(schedule.write_back, iteration.size());
  dict["fetches"] = fetches;
  return dict;
}

/// The followed iteration, with what the engine decides for it.
std::optional<Followed> decide(const std::vector<TracedOperator>& operators, const std::vector<double>& ms,
                               double host_ms, const PolicyOptions& options) {
  std::optional<Followed> followed = follow(operators, options);
  if (followed) {
    Schedule& schedule = followed->schedule;
    for (std::uint32_t op = 0; op < schedule.iteration.size(); ++op) {
      schedule.iteration.ops[op].ms = static_cast<float>(ms.at(followed->first + op));
      schedule.iteration.ops[op].host_ms =
          static_cast<float>(host_ms * schedule.iteration.steps / schedule.iteration.size());
    }
    choose_fastest(schedule, options);
  }
  return followed;
}

/// A recorded trace, of which schedules are made.
struct TracedLoop {
  explicit TracedLoop(std::vector<TracedOperator> traced) : operators(std::move(traced)) {}
  std::vector<TracedOperator> operators;
};

/// \param ms durations of the operators
/// \param host_ms what the program takes the host to queue those of a step
/// \param rates those of LinkRates, in its order
/// \return None: no operators repeat
py::object schedule_of(const TracedLoop& loop, const std::vector<double>& ms, std::size_t budget, double host_ms,
                       const std::array<double, 6>& rates, bool whole) {
  PolicyOptions options;
  options.rates = {rates[0], rates[1], rates[2], rates[3], rates[4], rates[5]};
  options.budget = budget - kStagingSlots * default_slot_bytes(budget);
  options.reserve = options.budget / kReserveShare;
  const auto found = without_gil([&] { return decide(loop.operators, ms, host_ms, options); });
  return found ? py::object(as_dict(*found, options.budget - options.reserve, whole)) : py::none();
}

} // namespace

void bind_schedules(pybind11::module_& module) {
  py::class_<TracedLoop>(module, "TracedLoop")
      .def(py::init<std::vector<TracedOperator>>(), py::arg("operators"), keeps_gil)
      .def("schedule", &schedule_of, py::arg("ms"), py::arg("budget"), py::arg("host_ms"), py::arg("rates"),
           py::arg("whole"), no_gil_inside);
}

} // namespace torch_uvm
