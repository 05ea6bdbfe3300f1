// Bindings of csrc/allocator's allocators: made, nested, asked for their figures, and chosen by scopes (tensor.cpp).
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>

#include "allocator/allocation_plan.h"
#include "allocator/arena.h"
#include "allocator/caching_allocator.h"
#include "allocator/counting_allocator.h"
#include "allocator/limiting_allocator.h"
#include "allocator/logging_allocator.h"
#include "allocator/pool_allocator.h"
#include "allocator/retrying_allocator.h"
#include "python/bindings.h"
#include "tensor/context.h"
#include "tensor/idle_allocators.h"
#include "tensor/process_allocator.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

Location location_of(const c10::Device& device) {
  return device.is_cpu() ? Location::host() : Location::device(std::max<int>(device.index(), 0));
}

py::dict figures_dict(const Allocator& allocator) {
  AllocatorFigures now;
  {
    const py::gil_scoped_release no_gil;
    now = allocator.figures();
  }
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
  const PassedThrough now = allocator.passed();
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

/// Calls Python wherever memory runs short, and may be let go of by any thread, after Python's end, too.
RetryingAllocator::Callback callback_of(py::function function) {
  const std::shared_ptr<py::function> kept(new py::function(std::move(function)), [](py::function* held) {
    if (Py_IsInitialized() != 0) { // else it is leaked: nobody is there to delete it
      const py::gil_scoped_acquire gil;
      delete held;
    }
  });
  return [kept](std::size_t bytes, Location home) {
    const py::gil_scoped_acquire gil;
    return py::bool_((*kept)(bytes, home.index)).cast<bool>();
  };
}

py::tuple outlived_pair(const Outlived& outlived) {
  return py::make_tuple(outlived.allocations, outlived.bytes);
}

py::dict report_dict(const AllocationPlan& plan) {
  PlanReport now;
  {
    const py::gil_scoped_release no_gil;
    now = plan.report();
  }
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
  for (const PlannedRequest& request : now.layout) {
    if (!request.apart) {
      layout.append(py::make_tuple(request.offset, request.bytes, request.begin, request.end));
    }
  }
  dict["layout"] = layout;
  return dict;
}

using Shared = std::shared_ptr<Allocator>;

} // namespace

void bind_allocators(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<Allocator, Shared>(module, "Allocator")
      .def("figures", &figures_dict)
      .def("release", &Allocator::release, no_gil)
      .def("serves", [](const Allocator& self, const c10::Device& device) { return self.serves(location_of(device)); })
      .def("description", &Allocator::description);
  py::class_<CountingAllocator, Allocator, std::shared_ptr<CountingAllocator>>(module, "CountingAllocator")
      .def("passed", &passed_dict)
      .def("reset_peaks", &CountingAllocator::reset_peaks);
  py::class_<LoggingAllocator, Allocator, std::shared_ptr<LoggingAllocator>>(module, "LoggingAllocator")
      .def(py::init([](Shared upstream, std::string path) {
             return std::make_shared<LoggingAllocator>(std::move(upstream),
                                                       std::make_shared<AllocationLog>(std::move(path)));
           }),
           py::arg("upstream"), py::arg("path"), no_gil)
      .def("close", [](const LoggingAllocator& self) {
        AllocationLogEnd end;
        {
          const py::gil_scoped_release released;
          end = self.log().close();
        }
        return py::make_tuple(end.rows, end.lost, end.error);
      });
  py::class_<Arena, Allocator, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init([](Shared upstream, const c10::Device& home, std::size_t initial, double growth) {
             auto arena = std::make_shared<Arena>(Context::get().runtime(), std::move(upstream),
                                                  ArenaOptions{location_of(home), initial, growth});
             remember(arena);
             return arena;
           }),
           py::arg("upstream"), py::arg("home"), py::arg("initial"), py::arg("growth"))
      .def("push", &Arena::push, no_gil)
      .def(
          "pop",
          [](Arena& self, Arena::Mark mark) {
            Outlived outlived;
            {
              const py::gil_scoped_release released;
              outlived = self.pop(mark);
            }
            return outlived_pair(outlived);
          },
          py::arg("mark"))
      .def("reset", [](Arena& self) {
        Outlived outlived;
        {
          const py::gil_scoped_release released;
          outlived = self.reset();
        }
        return outlived_pair(outlived);
      });
  py::class_<AllocationPlan, Allocator, std::shared_ptr<AllocationPlan>>(module, "AllocationPlan")
      .def(py::init([](Shared upstream, const c10::Device& home) {
             auto plan = std::make_shared<AllocationPlan>(std::move(upstream), location_of(home));
             remember(plan);
             return plan;
           }),
           py::arg("upstream"), py::arg("home"))
      .def("begin_iteration", &AllocationPlan::begin_iteration, no_gil)
      .def("end_iteration", &AllocationPlan::end_iteration, no_gil)
      .def("report", &report_dict);

  module.def("process_allocator", &process_allocator, no_gil);
  module.def("release_idle_memory", &release_idle_memory, no_gil);
  module.def(
      "caching_allocator",
      [](Shared upstream) -> Shared {
        return remember(std::make_shared<CachingAllocator>(Context::get().runtime(), std::move(upstream)));
      },
      py::arg("upstream"), no_gil);
  module.def(
      "pool_allocator",
      [](Shared upstream, const c10::Device& home, std::size_t initial, std::optional<std::size_t> maximum) -> Shared {
        return remember(std::make_shared<PoolAllocator>(Context::get().runtime(), std::move(upstream),
                                                        PoolOptions{location_of(home), initial, maximum, {}}));
      },
      py::arg("upstream"), py::arg("home"), py::arg("initial"), py::arg("maximum"), no_gil);
  module.def(
      "limiting_allocator",
      [](Shared upstream, std::size_t limit) -> Shared {
        return std::make_shared<LimitingAllocator>(std::move(upstream), limit);
      },
      py::arg("upstream"), py::arg("limit"));
  module.def(
      "counting_allocator", [](Shared upstream) { return std::make_shared<CountingAllocator>(std::move(upstream)); },
      py::arg("upstream"));
  module.def(
      "retrying_allocator",
      [](Shared upstream, py::function callback) -> Shared {
        return std::make_shared<RetryingAllocator>(std::move(upstream), callback_of(std::move(callback)));
      },
      py::arg("upstream"), py::arg("callback"));
}

} // namespace torch_uvm
