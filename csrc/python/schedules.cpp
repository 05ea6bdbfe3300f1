// Binding of the residency policy, to make schedules from recorded traces.
#include <pybind11/stl.h>

#include <array>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "residency/engine/shares.h"
#include "residency/policy/choose_fastest.h"
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

py::dict as_dict(const Followed& followed, std::size_t capacity) {
  const Iteration& iteration = followed.schedule.iteration;
  py::dict dict;
  dict["first"] = followed.first;
  dict["operators"] = iteration.size();
  dict["steps"] = iteration.steps;
  dict["capacity"] = capacity;
  dict["predicted_ms"] = followed.schedule.predicted_ms;
  py::list values;
  for (const Value& value : iteration.values) {
    values.append(py::make_tuple(value.bytes, value.created_at == kNone));
  }
  dict["values"] = values;
  py::list uses;
  std::vector<std::vector<std::uint32_t>> evictions(iteration.size()); // of what is on the device
  for (std::uint32_t at = 0; at < iteration.uses.size(); ++at) {
    const Use& use = iteration.uses[at];
    uses.append(py::make_tuple(use.value, use.op, use.writes, use.is_creation));
    if (followed.schedule.evicted_after[at] && !followed.schedule.in_place[at]) {
      evictions[use.op].push_back(use.value);
    }
  }
  dict["uses"] = uses;
  py::list workspaces;
  for (const Iteration::Op& op : iteration.ops) {
    workspaces.append(op.workspace);
  }
  dict["workspaces"] = workspaces;
  dict["frees"] = nested(iteration.frees, iteration.size());
  py::list fetches;
  for (const Fetch& fetch : followed.schedule.fetches) {
    fetches.append(py::make_tuple(fetch.value, fetch.issue, fetch.need));
  }
  dict["in_place"] = followed.schedule.in_place;
  dict["evictions"] = evictions;
  dict["write_backs"] = nested(followed.schedule.write_back, iteration.size());
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

/// \param ms durations of the operators
/// \param host_ms what the program takes the host to queue those of a step
/// \param rates those of LinkRates, in its order
py::object schedule_of(const std::vector<TracedOperator>& operators, const std::vector<double>& ms, std::size_t budget,
                       double host_ms, const std::array<double, 6>& rates) {
  PolicyOptions options;
  options.rates = {rates[0], rates[1], rates[2], rates[3], rates[4], rates[5]};
  options.budget = budget - kStagingSlots * default_slot_bytes(budget);
  options.reserve = options.budget / kReserveShare;
  const auto found = without_gil([&] { return decide(operators, ms, host_ms, options); });
  return found ? py::object(as_dict(*found, options.budget - options.reserve)) : py::none();
}

} // namespace

void bind_schedules(pybind11::module_& module) {
  module.def("schedule_of", &schedule_of, py::arg("operators"), py::arg("ms"), py::arg("budget"), py::arg("host_ms"),
             py::arg("rates"), no_gil_inside);
}

} // namespace torch_uvm
