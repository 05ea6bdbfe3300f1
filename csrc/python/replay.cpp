// Bindings of csrc/allocator/replay/allocation_log.h and replay.h: recording and replay of allocations.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "allocator/replay/allocation_log.h"
#include "allocator/replay/replay.h"
#include "python/bindings.h"
#include "tensor/process/context.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

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
  allocator.set_observer(recording.log.get());
}

AllocationLogEnd stop_recording() {
  Recording& recording = Recording::get();
  const std::lock_guard lock(recording.mutex);
  if (recording.log == nullptr) {
    return {};
  }
  Context::get().managed_allocator().set_observer(nullptr);
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
    const Location place = home.is_cpu() ? Location::host() : Location::device(home.index());
    const ReplayOptions options{place, initial, Context::get().options().allocator};
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

} // namespace

void bind_replay(py::module_& module) {
  module.def("start_recording_allocations", &start_recording, py::arg("path"), no_gil);
  module.def(
      "stop_recording_allocations",
      [] {
        const AllocationLogEnd end = without_gil(&stop_recording);
        return py::make_tuple(end.rows, end.lost, end.error);
      },
      no_gil_inside);
  module.def("replay_allocators", &replay_allocators, keeps_gil);
  module.def("replay", &replay_on, py::arg("allocator"), py::arg("events"), py::arg("logged_streams"), py::arg("home"),
             py::arg("initial"), py::arg("sample"), no_gil_inside);
}

} // namespace torch_uvm
