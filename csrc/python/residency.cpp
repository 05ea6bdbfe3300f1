// Bindings of the residency engine: csrc/tensor/process/process_engine.h and csrc/tensor/dispatch/pins.h.
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "tensor/dispatch/pins.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

py::dict traffic_dict(const ResidencyStatistics::Traffic& traffic) {
  py::dict dict;
  dict["count"] = traffic.count;
  dict["bytes"] = traffic.bytes;
  dict["ms"] = traffic.ms;
  return dict;
}

py::dict residency_stats() {
  const ResidencyStatistics now = without_gil([] {
    Engine* const engine = engine_in_use();
    return engine == nullptr ? ResidencyStatistics() : engine->statistics();
  });
  py::dict dict;
  dict["fetched"] = traffic_dict(now.fetched);
  dict["written_back"] = traffic_dict(now.written_back);
  dict["dropped_clean"] = traffic_dict(now.dropped_clean);
  dict["used_in_place"] = traffic_dict(now.used_in_place);
  dict["waited"] = traffic_dict(now.waited);
  dict["moved"] = traffic_dict(now.moved);
  dict["made_room"] = traffic_dict(now.made_room);
  dict["plan_hits"] = now.plan_hits;
  dict["plan_misses"] = now.plan_misses;
  dict["over_budget"] = now.over_budget;
  dict["device_bytes"] = now.device_bytes;
  dict["peak_device_bytes"] = now.peak_device_bytes;
  dict["host_bytes"] = now.host_bytes;
  dict["records"] = now.records;
  dict["failures"] = now.failures;
  return dict;
}

py::tuple residency_counts() {
  const ResidencyCounts now = without_gil([] {
    Engine* const engine = engine_in_use();
    return engine == nullptr ? ResidencyCounts() : engine->counts();
  });
  return py::make_tuple(now.observed, now.written_back, now.used_in_place, now.over_budget, now.failures);
}

} // namespace

void bind_residency(py::module_& module) {
  module.def("set_budget", &set_budget, py::arg("device"), py::arg("bytes"),
             py::arg("ceiling") = CachingManagedAllocator::kNoCeiling, no_gil);
  module.def(
      "budget", [](int device) { return engine_in_use() == nullptr ? std::nullopt : engine_in_use()->budget(device); },
      py::arg("device"), no_gil);
  module.def("set_host_limit", &set_host_limit, py::arg("bytes"), no_gil);
  module.def("residency_stats", &residency_stats, no_gil_inside);
  module.def("residency_counts", &residency_counts, no_gil_inside);
  module.def(
      "predicted_ms_per_operator",
      [] {
        Engine* const engine = engine_in_use();
        return engine == nullptr ? std::optional<double>(0) : engine->predicted_ms_per_operator();
      },
      no_gil);
  module.def(
      "reset_residency_stats",
      [] {
        if (Engine* const engine = engine_in_use()) {
          engine->reset_statistics();
        }
      },
      no_gil);
  module.def(
      "keep_resident",
      [](const std::vector<at::Tensor>& tensors, bool keep) {
        std::size_t kept = 0;
        try {
          for (; kept < tensors.size(); ++kept) {
            keep_resident(tensors[kept], keep);
          }
        } catch (...) {
          for (std::size_t each = 0; keep && each < kept; ++each) { // all or none
            keep_resident(tensors[each], false);
          }
          throw;
        }
      },
      py::arg("tensors"), py::arg("keep"), no_gil);
  module.def("materialise", &materialise, py::arg("tensor"), no_gil);
  module.def(
      "mark_step",
      [] {
        if (Engine* const engine = engine_in_use()) {
          engine->mark_step();
        }
      },
      no_gil);
  module.def(
      "start_recording_accesses",
      [](const std::string& path) {
        Engine* const engine = engine_in_use();
        if (engine == nullptr) {
          throw InvalidArgument("accesses are seen on devices with a budget only; set one before recording");
        }
        engine->start_recording(path);
      },
      py::arg("path"), no_gil);
  module.def(
      "stop_recording_accesses",
      [] {
        if (Engine* const engine = engine_in_use()) {
          engine->stop_recording();
        }
      },
      no_gil);
}

} // namespace torch_uvm
