// Test bindings, only in builds with TORCH_UVM_TEST_BINDINGS=1: the classes below torch as a Python submodule,
// `_C.test_bindings`, and failing calls of the emulated accelerator.
//
// Addresses are ints. Homes are ints too: a device, or HOST.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "emulated/backend.h"
#include "python/test_bindings.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/testing/emulated_failures.h"
#include "runtime/testing/recording_runtime.h"

namespace torch_uvm {

namespace {

namespace py = pybind11;
using py::arg;

void bind_values(py::module_& classes) {
  classes.attr("HOST") = Location::host().index;

  py::class_<Stream>(classes, "Stream", "A queue of work on a device; device -1 is the host, which has none.")
      .def_static("host", &Stream::host, keeps_gil)
      .def_static("default_of", &Stream::default_of, arg("device"), keeps_gil)
      .def_readonly("device", &Stream::device, keeps_gil)
      .def(
          "__eq__", [](const Stream& self, const Stream& other) { return self == other; }, keeps_gil)
      .def(
          "__hash__", [](const Stream& self) { return std::hash<Stream>{}(self); }, keeps_gil)
      .def(
          "__repr__",
          [](const Stream& self) {
            return py::str("Stream(device={}, handle={:#x})").format(self.device, address_of(self.handle));
          },
          keeps_gil);

  py::class_<Event>(classes, "Event", "A point in a stream; destroyed by `destroy_event`.");

  py::enum_<Advice>(classes, "Advice")
      .value("SET_READ_MOSTLY", Advice::kSetReadMostly)
      .value("UNSET_READ_MOSTLY", Advice::kUnsetReadMostly)
      .value("SET_PREFERRED_LOCATION", Advice::kSetPreferredLocation)
      .value("UNSET_PREFERRED_LOCATION", Advice::kUnsetPreferredLocation)
      .value("SET_ACCESSED_BY", Advice::kSetAccessedBy)
      .value("UNSET_ACCESSED_BY", Advice::kUnsetAccessedBy);

  classes.def(
      "write",
      [](std::uintptr_t address, const py::bytes& contents) {
        const std::string_view bytes = contents;
        std::memcpy(pointer_of(address), bytes.data(), bytes.size());
      },
      arg("address"), arg("contents"), "Writes bytes at an address, as host code. Checks nothing.", keeps_gil);
  classes.def(
      "read",
      [](std::uintptr_t address, std::size_t count) {
        return py::bytes(static_cast<const char*>(pointer_of(address)), count);
      },
      arg("address"), arg("count"), "The bytes at an address, read as host code. Checks nothing.", keeps_gil);
}

void bind_runtime(py::module_& classes) {
  py::class_<ManagedRuntime, std::shared_ptr<ManagedRuntime>>(classes, "ManagedRuntime")
      .def_property_readonly("name", &ManagedRuntime::name, keeps_gil)
      .def(
          "allocate_managed",
          [](ManagedRuntime& self, std::size_t bytes, int home) {
            return address_of(self.allocate_managed(bytes, Location{home}));
          },
          arg("bytes"), arg("home"), no_gil)
      .def(
          "free_managed", [](ManagedRuntime& self, std::uintptr_t address) { self.free_managed(pointer_of(address)); },
          arg("address"), no_gil)
      .def_property("limit", &ManagedRuntime::limit, &ManagedRuntime::set_limit, keeps_gil)
      .def_property_readonly("managed_bytes", &ManagedRuntime::managed_bytes, keeps_gil)
      .def_property_readonly("peak_managed_bytes", &ManagedRuntime::peak_managed_bytes, keeps_gil)
      .def_property_readonly("device_count", unlocked(&ManagedRuntime::device_count))
      .def_property_readonly("host_memory_available", unlocked(&ManagedRuntime::host_memory_available))
      .def(
          "prefetch",
          [](ManagedRuntime& self, std::uintptr_t address, std::size_t bytes, int to, Stream stream) {
            self.prefetch(pointer_of(address), bytes, Location{to}, stream);
          },
          arg("address"), arg("bytes"), arg("to"), arg("stream"), no_gil)
      .def(
          "advise",
          [](ManagedRuntime& self, std::uintptr_t address, std::size_t bytes, Advice advice, int location) {
            self.advise(pointer_of(address), bytes, advice, Location{location});
          },
          arg("address"), arg("bytes"), arg("advice"), arg("location"), no_gil)
      .def(
          "discard",
          [](ManagedRuntime& self, std::uintptr_t address, std::size_t bytes, Stream stream) {
            self.discard(pointer_of(address), bytes, stream);
          },
          arg("address"), arg("bytes"), arg("stream"), no_gil)
      .def(
          "copy_async",
          [](ManagedRuntime& self, std::uintptr_t dst, std::uintptr_t src, std::size_t bytes, Stream stream) {
            self.copy_async(pointer_of(dst), pointer_of(src), bytes, stream);
          },
          arg("dst"), arg("src"), arg("bytes"), arg("stream"), no_gil)
      .def("create_stream", &ManagedRuntime::create_stream, arg("device"), arg("priority") = 0, no_gil)
      .def("destroy_stream", &ManagedRuntime::destroy_stream, arg("stream"), no_gil)
      .def("query_stream", &ManagedRuntime::query_stream, arg("stream"), no_gil)
      .def("synchronize_stream", &ManagedRuntime::synchronize_stream, arg("stream"), no_gil)
      .def("synchronize_device", &ManagedRuntime::synchronize_device, arg("device"), no_gil)
      .def("create_event", &ManagedRuntime::create_event, arg("device"), arg("timing") = false, no_gil)
      .def("destroy_event", &ManagedRuntime::destroy_event, arg("event"), no_gil)
      .def("record_event", &ManagedRuntime::record_event, arg("event"), arg("stream"), no_gil)
      .def("query_event", &ManagedRuntime::query_event, arg("event"), no_gil)
      .def("synchronize_event", &ManagedRuntime::synchronize_event, arg("event"), no_gil)
      .def("wait_event", &ManagedRuntime::wait_event, arg("stream"), arg("event"), no_gil);

  py::class_<RecordingRuntime, ManagedRuntime, std::shared_ptr<RecordingRuntime>>(
      classes, "RecordingRuntime", "Host memory, every call recorded; the Nth call of a kind can be made to fail.")
      .def(py::init<int>(), arg("devices") = 1, no_gil)
      .def(
          "calls",
          [](const RecordingRuntime& self) {
            const std::vector<RecordedCall> recorded = without_gil([&] { return self.calls(); });
            py::list calls;
            for (const RecordedCall& call : recorded) {
              calls.append(py::dict(arg("name") = call.name, arg("address") = address_of(call.ptr),
                                    arg("bytes") = call.bytes, arg("location") = call.location.index,
                                    arg("stream") = call.stream, arg("failed") = call.failed));
            }
            return calls;
          },
          "Every call since `clear_calls`, oldest first, as dicts.", no_gil_inside)
      .def("count", &RecordingRuntime::count, arg("name"), no_gil)
      .def("clear_calls", &RecordingRuntime::clear_calls, no_gil)
      .def("fail", &RecordingRuntime::fail, arg("name"), arg("nth"), no_gil)
      .def("clear_failures", &RecordingRuntime::clear_failures, no_gil)
      .def("hold", &RecordingRuntime::hold, arg("stream"), no_gil)
      .def("release", &RecordingRuntime::release, arg("stream"), no_gil)
      .def("set_host_memory_available", &RecordingRuntime::set_host_memory_available, arg("bytes"), no_gil)
      .def("live_objects", &RecordingRuntime::live_objects, no_gil);

  py::class_<EmulatedRuntime, ManagedRuntime, std::shared_ptr<EmulatedRuntime>>(
      classes, "EmulatedRuntime", "The emulated accelerator's memory: residency, faults, queues, a modelled clock.")
      .def(py::init([](int devices, std::size_t memory, std::string profile, std::optional<std::uint64_t> seed) {
             return without_gil([&] {
               return std::make_shared<EmulatedRuntime>(EmulatedConfig{devices, memory, std::move(profile), seed});
             });
           }),
           arg("devices") = 1, arg("memory") = 256 * std::size_t{1 << 20}, arg("profile") = "h200",
           arg("seed") = py::none(), no_gil_inside)
      .def_property_readonly_static(
          "PAGE_BYTES", [](const py::object&) { return EmulatedRuntime::kPageBytes; }, keeps_gil)
      .def("pending_operations", &EmulatedRuntime::pending_operations, no_gil)
      .def("resident_bytes", &EmulatedRuntime::resident_bytes, arg("device"), no_gil)
      .def("time_us", &EmulatedRuntime::time_us, "The latest of all clocks; modelled.", no_gil);
}

EmulatedFailures& emulated_failures() {
  static auto* failures = new EmulatedFailures(emulated::runtime()); // leaked, like the runtime
  return *failures;
}

} // namespace

void bind_test_bindings(py::module_& module) {
  module.def(
      "emu_fail_call", [](const std::string& name, std::size_t nth) { emulated_failures().fail(name, nth); },
      py::arg("name"), py::arg("nth"), no_gil);
  module.def("emu_clear_failures", [] { return emulated_failures().clear(); }, no_gil);
  py::module_ classes = module.def_submodule("test_bindings", "The classes below torch, for tests.");
  bind_values(classes);
  bind_runtime(classes);
  bind_test_allocator(classes);
}

} // namespace torch_uvm
