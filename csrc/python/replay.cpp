// Bindings of csrc/allocator/replay/allocation_log.h and replay.h: recording and replay of allocations.
#include <torch/csrc/utils/pybind.h>

#include <cstring>
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

/// \param column an array.array, or bytes, with unsigned integers of the width of Number
template <typename Number>
std::vector<Number> column_of(const py::buffer& column, const char* name) {
  const py::buffer_info info = column.request();
  if (info.ndim != 1 || info.itemsize != sizeof(Number) || info.strides[0] != info.itemsize) {
    throw InvalidArgument(std::string(name) + " is no array of numbers of " + std::to_string(sizeof(Number)) +
                          " bytes");
  }
  std::vector<Number> numbers(static_cast<std::size_t>(info.size));
  if (!numbers.empty()) {
    std::memcpy(numbers.data(), info.ptr, numbers.size() * sizeof(Number));
  }
  return numbers;
}

ReplayLog log_of(const py::buffer& kinds, const py::buffer& allocations, const py::buffer& bytes,
                 const py::buffer& streams, const std::vector<std::uint64_t>& logged_streams, std::uint32_t count) {
  const auto kind = column_of<std::uint8_t>(kinds, "kinds");
  const auto allocation = column_of<std::uint32_t>(allocations, "allocations");
  const auto size = column_of<std::uint64_t>(bytes, "bytes");
  const auto stream = column_of<std::uint32_t>(streams, "streams");
  if (allocation.size() != kind.size() || size.size() != kind.size() || stream.size() != kind.size()) {
    throw InvalidArgument("columns of different lengths");
  }
  ReplayLog log;
  log.allocations = count;
  for (const std::uint64_t logged : logged_streams) {
    log.streams.push_back(stream_from_log(logged));
  }
  log.events.reserve(kind.size());
  for (std::size_t at = 0; at < kind.size(); ++at) {
    log.events.push_back({static_cast<ReplayEvent::Kind>(kind[at]), stream[at], allocation[at], size[at]});
  }
  return log;
}

py::bytes raw(const std::vector<std::size_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::size_t)};
}

py::dict replay_on(const std::string& allocator, const py::buffer& kinds, const py::buffer& allocations,
                   const py::buffer& bytes, const py::buffer& streams, const std::vector<std::uint64_t>& logged_streams,
                   std::uint32_t count, std::size_t ceiling, std::size_t initial, int repeat,
                   const py::object& progress) {
  const ReplayLog log = log_of(kinds, allocations, bytes, streams, logged_streams, count);
  const ReplayResult result = without_gil([&] {
    ManagedRuntime& runtime = Context::get().runtime();
    log.check(runtime); // before any other use: throws for an invalid log
    const ReplayOptions options{log.busiest_home(), ceiling, initial, Context::get().options().allocator};
    const auto make = [&] { return make_subject(allocator, runtime, options); };
    const auto tell = [&](std::size_t done, std::size_t of) {
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) {
        throw py::error_already_set();
      }
      if (!progress.is_none()) {
        progress(done, of);
      }
    };
    return replay(log, runtime, make, repeat, tell);
  });
  py::dict dict;
  dict["description"] = result.description;
  dict["seconds"] = result.seconds;
  dict["last_iteration_seconds"] = result.last_iteration_seconds;
  dict["last_iteration_calls"] = result.last_iteration_calls;
  dict["calls"] = result.calls;
  dict["peak_live"] = result.peak_live;
  dict["peak_reserved"] = result.peak_reserved;
  dict["mean_live"] = result.mean_live;
  dict["mean_reserved"] = result.mean_reserved;
  dict["runtime_allocations"] = result.runtime_allocations;
  dict["runtime_frees"] = result.runtime_frees;
  dict["events_recorded"] = result.events_recorded;
  dict["details"] = result.details;
  dict["live"] = raw(result.live);
  dict["reserved"] = raw(result.reserved);
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
  module.def("replay", &replay_on, py::arg("allocator"), py::arg("kinds"), py::arg("allocations"), py::arg("bytes"),
             py::arg("streams"), py::arg("logged_streams"), py::arg("count"), py::arg("ceiling"), py::arg("initial"),
             py::arg("repeat"), py::arg("progress") = py::none(), no_gil_inside);
}

} // namespace torch_uvm
