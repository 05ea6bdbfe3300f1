// Bindings of the allocators of csrc/allocator. Scopes (tensor.cpp) choose one of them.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "allocator/adaptors/adaptors.h"
#include "allocator/adaptors/caching_allocator.h"
#include "allocator/arena/arena.h"
#include "allocator/plan/allocation_plan.h"
#include "allocator/replay/allocation_log.h"
#include "python/bindings.h"
#include "tensor/process/context.h"
#include "tensor/storage/idle_allocators.h"
#include "tensor/storage/process_allocator.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

Location location_of(const c10::Device& device) {
  return device.is_cpu() ? Location::host() : Location::device(std::max<int>(device.index(), 0));
}

py::dict figures_dict(const Allocator& allocator) {
  const AllocatorFigures now = without_gil([&] { return allocator.figures(); });
  py::dict dict;
  dict["allocations"] = now.allocations;
  dict["requested_bytes"] = now.requested_bytes;
  dict["reserved_bytes"] = now.reserved_bytes;
  dict["peak_requested_bytes"] = now.peak_requested_bytes;
  dict["peak_reserved_bytes"] = now.peak_reserved_bytes;
  dict["upstream_allocations"] = now.upstream_allocations;
  dict["upstream_frees"] = now.upstream_frees;
  dict["events_recorded"] = now.events_recorded;
  return dict;
}

py::dict passed_dict(const CountingAllocator& allocator) {
  const PassedThrough now = without_gil([&] { return allocator.passed(); });
  py::dict dict;
  dict["allocations"] = now.allocations;
  dict["peak_allocations"] = now.peak_allocations;
  dict["total_allocations"] = now.total_allocations;
  dict["bytes"] = now.bytes;
  dict["peak_bytes"] = now.peak_bytes;
  dict["total_bytes"] = now.total_bytes;
  dict["failures"] = now.failures;
  return dict;
}

/// A memory-pressure callback that calls Python. Any thread may destroy it, even after the interpreter has ended.
RetryingAllocator::Callback callback_of(py::function function) {
  const std::shared_ptr<py::function> kept(new py::function(std::move(function)), [](py::function* held) {
    if (Py_IsInitialized() != 0) { // else leaked, because it cannot be deleted without an interpreter
      const py::gil_scoped_acquire gil;
      delete held;
    }
  });
  return [kept](std::size_t bytes, Location home) {
    const py::gil_scoped_acquire gil;
    return py::bool_((*kept)(bytes, home.index)).cast<bool>();
  };
}

py::tuple outlived_pair(const Outlived& expired) {
  return py::make_tuple(expired.allocations, expired.bytes);
}

py::dict report_dict(const AllocationPlan& plan) {
  const PlanReport now = without_gil([&] { return plan.report(); });
  py::dict dict;
  dict["iterations"] = now.iterations;
  dict["plans"] = now.plans;
  dict["hits"] = now.hits;
  dict["misses"] = now.misses;
  dict["outlived"] = now.outlived;
  dict["requests"] = now.requests;
  dict["planned_requests"] = now.planned_requests;
  dict["planned_bytes"] = now.planned_bytes;
  dict["peak_live_bytes"] = now.peak_live_bytes;
  py::list layout;
  for (const auto& [offset, request] : now.layout) {
    layout.append(py::make_tuple(offset, request.bytes, request.begin, request.end));
  }
  dict["layout"] = layout;
  return dict;
}

using Shared = std::shared_ptr<Allocator>;

} // namespace

void bind_allocators(py::module_& module) {
  // The destructor of an allocator frees its memory.
  const py::release_gil_before_calling_cpp_dtor no_gil_at_end;
  py::class_<Allocator, Shared>(module, "Allocator", no_gil_at_end)
      .def("figures", &figures_dict, no_gil_inside)
      .def("release", &Allocator::release, no_gil)
      .def(
          "serves", [](const Allocator& self, const c10::Device& device) { return self.serves(location_of(device)); },
          no_gil)
      .def("description", &Allocator::description, no_gil);
  py::class_<CountingAllocator, Allocator, std::shared_ptr<CountingAllocator>>(module, "CountingAllocator",
                                                                               no_gil_at_end)
      .def("passed", &passed_dict, no_gil_inside)
      .def("reset_peaks", &CountingAllocator::reset_peaks, no_gil);
  py::class_<LoggingAllocator, Allocator, std::shared_ptr<LoggingAllocator>>(module, "LoggingAllocator", no_gil_at_end)
      .def(py::init([](Shared upstream, std::string path) {
             return without_gil(
                 [&] { return std::make_shared<LoggingAllocator>(std::move(upstream), std::move(path)); });
           }),
           py::arg("upstream"), py::arg("path"), no_gil_inside)
      .def(
          "close",
          [](LoggingAllocator& self) {
            const AllocationLogEnd end = without_gil([&] { return self.log().close(); });
            return py::make_tuple(end.rows, end.lost, end.error);
          },
          no_gil_inside);
  py::class_<Arena, Allocator, std::shared_ptr<Arena>>(module, "Arena", no_gil_at_end)
      .def(py::init([](Shared upstream, const c10::Device& home, std::size_t initial) {
             return without_gil([&] {
               auto arena = std::make_shared<Arena>(Context::get().runtime(), std::move(upstream),
                                                    ArenaOptions{location_of(home), initial});
               remember(arena);
               return arena;
             });
           }),
           py::arg("upstream"), py::arg("home"), py::arg("initial"), no_gil_inside)
      .def("push", &Arena::push, no_gil)
      .def(
          "pop", [](Arena& self) { return outlived_pair(without_gil([&] { return self.pop(); })); }, no_gil_inside)
      .def(
          "reset", [](Arena& self) { return outlived_pair(without_gil([&] { return self.reset(); })); }, no_gil_inside);
  py::class_<AllocationPlan, Allocator, std::shared_ptr<AllocationPlan>>(module, "AllocationPlan", no_gil_at_end)
      .def(py::init([](Shared upstream, const c10::Device& home) {
             return without_gil([&] {
               auto plan = std::make_shared<AllocationPlan>(std::move(upstream), location_of(home));
               remember(plan);
               return plan;
             });
           }),
           py::arg("upstream"), py::arg("home"), no_gil_inside)
      .def("begin_iteration", &AllocationPlan::begin_iteration, no_gil)
      .def("end_iteration", &AllocationPlan::end_iteration, no_gil)
      .def("report", &report_dict, no_gil_inside);

  module.def("process_allocator", &process_allocator, no_gil);
  module.def(
      "caching_allocator",
      [](Shared upstream, const c10::Device& home, std::size_t initial, std::optional<std::size_t> maximum) -> Shared {
        return remember(std::make_shared<CachingAllocator>(Context::get().runtime(), std::move(upstream),
                                                           CachingOptions{location_of(home), initial, maximum}));
      },
      py::arg("upstream"), py::arg("home"), py::arg("initial"), py::arg("maximum"), no_gil);
  module.def(
      "counting_allocator",
      [](Shared upstream, std::optional<std::size_t> limit) {
        return std::make_shared<CountingAllocator>(std::move(upstream), limit);
      },
      py::arg("upstream"), py::arg("limit"), keeps_gil);
  module.def(
      "retrying_allocator",
      [](Shared upstream, py::function callback) -> Shared {
        return std::make_shared<RetryingAllocator>(std::move(upstream), callback_of(std::move(callback)));
      },
      py::arg("upstream"), py::arg("callback"), keeps_gil);
}

} // namespace torch_uvm
