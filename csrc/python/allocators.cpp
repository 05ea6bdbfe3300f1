// Bindings of the allocators of csrc/allocator, of which scopes (tensor.cpp) choose one, and of logs and replays of
// allocations.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "allocator/adaptors/adaptors.h"
#include "allocator/adaptors/caching_allocator.h"
#include "allocator/allocation_log.h"
#include "allocator/arena/arena.h"
#include "allocator/plan/allocation_plan.h"
#include "allocator/replay/replay.h"
#include "python/bindings.h"
#include "tensor/process/context.h"
#include "tensor/storage/user_allocators.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

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

py::dict passed_dict(const Adaptor& allocator) {
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
std::function<bool(std::size_t, Location)> callback_of(py::function function) {
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
  dict["planned_bytes"] = now.planned_bytes;
  py::list layout;
  for (const auto& [offset, request] : now.layout) {
    layout.append(py::make_tuple(offset, request.bytes, request.begin, request.end));
  }
  dict["layout"] = layout;
  return dict;
}

/// The log of the process's managed allocations; nullptr while none is recorded. Lock order: before the allocator's
/// mutex.
struct Recording {
  std::mutex mutex;
  std::unique_ptr<AllocationLog> log;

  static Recording& get() {
    static auto* recording = new Recording(); // leaked, because memory is freed even after static destructors
    return *recording;
  }
};

void start_recording(const std::string& path) {
  Recording& recording = Recording::get();
  CachingManagedAllocator& allocator = Context::get().managed_allocator();
  const std::lock_guard lock(recording.mutex);
  if (recording.log != nullptr) {
    throw RuntimeFailure("allocations are recorded already; one recording at a time");
  }
  recording.log = std::make_unique<AllocationLog>(path);
  allocator.set_log(recording.log.get());
}

AllocationLogEnd stop_recording() {
  Recording& recording = Recording::get();
  const std::lock_guard lock(recording.mutex);
  if (recording.log == nullptr) {
    return {};
  }
  Context::get().managed_allocator().set_log(nullptr);
  const std::unique_ptr<AllocationLog> log = std::move(recording.log);
  return log->close();
}

/// \param events rows of kind, stream, allocation and bytes \param logged_streams the streams that rows name by index
py::dict replay_on(const std::string& allocator, const std::vector<std::array<std::uint64_t, 4>>& events,
                   const std::vector<std::uint64_t>& logged_streams, const c10::Device& home, std::size_t initial,
                   bool sample) {
  const ReplayResult result = without_gil([&] {
    ReplayLog log;
    log.allocations = static_cast<std::uint32_t>(events.size());
    std::ranges::transform(logged_streams, std::back_inserter(log.streams), &stream_from_log);
    for (const auto& [kind, stream, allocation, bytes] : events) {
      log.events.push_back({static_cast<ReplayEvent::Kind>(kind), static_cast<std::uint32_t>(stream),
                            static_cast<std::uint32_t>(allocation), bytes});
    }
    ManagedRuntime& runtime = Context::get().runtime();
    const ReplayOptions options{location_of(home), initial, Context::get().options().allocator};
    return replay(log, runtime, allocator, options, sample);
  });
  py::dict dict;
  dict["seconds"] = result.seconds;
  dict["last_iteration_seconds"] = result.last_iteration_seconds;
  dict["reserved"] = result.reserved;
  dict["peak_reserved"] = result.peak_reserved;
  dict["runtime_allocations"] = result.runtime_allocations;
  dict["runtime_frees"] = result.runtime_frees;
  dict["failure"] = result.failure;
  dict["failed_at"] = result.failed_at;
  return dict;
}

py::tuple end_tuple(const AllocationLogEnd& end) {
  return py::make_tuple(end.rows, end.lost, end.error);
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
  py::class_<Adaptor, Allocator, std::shared_ptr<Adaptor>>(module, "Adaptor", no_gil_at_end)
      .def(py::init([](Shared upstream, std::optional<std::size_t> limit, std::optional<py::function> callback,
                       std::string log) {
             AdaptorOptions options{limit, callback ? callback_of(std::move(*callback)) : nullptr, std::move(log)};
             return without_gil([&] { return std::make_shared<Adaptor>(std::move(upstream), std::move(options)); });
           }),
           py::arg("upstream"), py::arg("limit") = py::none(), py::arg("callback") = py::none(), py::arg("log") = "",
           no_gil_inside)
      .def("passed", &passed_dict, no_gil_inside)
      .def("reset_peaks", &Adaptor::reset_peaks, no_gil)
      .def(
          "close_log", [](Adaptor& self) { return end_tuple(without_gil([&] { return self.close_log(); })); },
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
  module.def("start_recording_allocations", &start_recording, py::arg("path"), no_gil);
  module.def("stop_recording_allocations", [] { return end_tuple(without_gil(&stop_recording)); }, no_gil_inside);
  module.def("replay_allocators", &replay_allocators, keeps_gil);
  module.def("replay", &replay_on, py::arg("allocator"), py::arg("events"), py::arg("logged_streams"), py::arg("home"),
             py::arg("initial"), py::arg("sample"), no_gil_inside);
}

} // namespace torch_uvm
