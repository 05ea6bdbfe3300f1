// The floors below torch, as Python sees them, for tests: submodule `_C.floors`.
//
// Addresses are ints, homes are ints (a device, or HOST), a block is an object that frees itself when
// it is dropped, so that a failing test cannot leave a block behind its allocator's back.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "python/bindings.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/recording/recording_runtime.h"

namespace torch_uvm {

namespace {

namespace py = pybind11;
using py::arg;

std::uintptr_t address_of(const void* ptr) {
  return reinterpret_cast<std::uintptr_t>(ptr);
}

void* pointer_of(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

/// A property's getter or setter that runs without the GIL: what is named beside a property does not reach it.
template <typename Call>
py::cpp_function unlocked(Call call) {
  return {std::move(call), no_gil};
}

/// Calls back into Python for room.
class PythonRoomMaker final : public RoomMaker {
 public:
  explicit PythonRoomMaker(py::function function) : function_(std::move(function)) {}
  ~PythonRoomMaker() override { // its allocator goes without the GIL
    const py::gil_scoped_acquire gil;
    function_ = py::function();
  }
  bool make_room(std::size_t bytes, Location home, Stream /*stream*/) override {
    py::gil_scoped_acquire gil;
    return function_(bytes, home.index).cast<bool>();
  }

 private:
  py::function function_;
};

/// An allocator with what it stands on. Members go in the reverse order: the allocator first.
struct OwnedAllocator {
  std::shared_ptr<ManagedRuntime> runtime;
  std::vector<std::unique_ptr<PythonRoomMaker>> room_makers; ///< those taken away too: one may be in a call
  std::unique_ptr<CachingManagedAllocator> allocator;
};

/// A block in Python's hands.
class OwnedBlock {
 public:
  OwnedBlock(std::shared_ptr<OwnedAllocator> owner, Block* block) : owner_(std::move(owner)), block_(block) {}
  OwnedBlock(const OwnedBlock&) = delete;
  OwnedBlock& operator=(const OwnedBlock&) = delete;
  ~OwnedBlock() {
    owner_->allocator->free(block_);
  }

  CachingManagedAllocator& allocator() const {
    return *owner_->allocator;
  }
  Block* get() const {
    if (block_ == nullptr) {
      throw InvalidArgument("this block was freed");
    }
    return block_;
  }
  void free() {
    get(); // says so if it was freed before
    owner_->allocator->free(std::exchange(block_, nullptr));
  }
  unsigned char* data() const {
    return static_cast<unsigned char*>(allocator().data(get()));
  }
  std::size_t requested_bytes() const {
    return allocator().requested_bytes(get());
  }

 private:
  std::shared_ptr<OwnedAllocator> owner_;
  Block* block_;
};

std::unique_ptr<SegmentSource> make_source(ManagedRuntime& runtime, bool managed) {
  if (managed) {
    return std::make_unique<ManagedSegmentSource>(runtime);
  }
  return std::make_unique<DeviceSegmentSource>(runtime);
}

const char* name_of(BlockInfo::State state) {
  switch (state) {
    case BlockInfo::State::kAllocated:
      return "allocated";
    case BlockInfo::State::kPendingFree:
      return "pending";
    case BlockInfo::State::kFree:
      return "free";
  }
  return "unknown";
}

py::list snapshot_of(const OwnedAllocator& self) {
  const std::vector<SegmentInfo> found = without_gil([&] { return self.allocator->snapshot(); });
  py::list segments;
  for (const SegmentInfo& segment : found) {
    py::list blocks;
    for (const BlockInfo& block : segment.blocks) {
      blocks.append(py::dict(arg("address") = block.address, arg("bytes") = block.bytes,
                             arg("requested_bytes") = block.requested_bytes, arg("state") = name_of(block.state),
                             arg("home") = block.home.index, arg("stream") = block.stream));
    }
    segments.append(
        py::dict(arg("address") = segment.address, arg("bytes") = segment.bytes, arg("home") = segment.home.index,
                 arg("pool") = segment.kind == PoolKind::kSmall ? "small" : "large",
                 arg("allocated_bytes") = segment.allocated_bytes, arg("active_bytes") = segment.active_bytes,
                 arg("requested_bytes") = segment.requested_bytes, arg("blocks") = blocks));
  }
  return segments;
}

std::optional<Location> location_of(std::optional<int> home) {
  return home ? std::optional<Location>(Location{*home}) : std::nullopt;
}

void bind_values(py::module_& floors) {
  floors.attr("HOST") = Location::host().index;

  py::class_<Stream>(floors, "Stream", "A queue of work on a device; device -1 is the host, which has none.")
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

  py::class_<Event>(floors, "Event", "A point in a stream; destroyed by `destroy_event`.");

  py::enum_<Advice>(floors, "Advice")
      .value("SET_READ_MOSTLY", Advice::kSetReadMostly)
      .value("UNSET_READ_MOSTLY", Advice::kUnsetReadMostly)
      .value("SET_PREFERRED_LOCATION", Advice::kSetPreferredLocation)
      .value("UNSET_PREFERRED_LOCATION", Advice::kUnsetPreferredLocation)
      .value("SET_ACCESSED_BY", Advice::kSetAccessedBy)
      .value("UNSET_ACCESSED_BY", Advice::kUnsetAccessedBy);

  floors.def(
      "write",
      [](std::uintptr_t address, const py::bytes& contents) {
        const std::string_view bytes = contents;
        std::memcpy(pointer_of(address), bytes.data(), bytes.size());
      },
      arg("address"), arg("contents"), "Writes bytes at an address, as host code. Checks nothing.", keeps_gil);
  floors.def(
      "read",
      [](std::uintptr_t address, std::size_t count) {
        return py::bytes(static_cast<const char*>(pointer_of(address)), count);
      },
      arg("address"), arg("count"), "The bytes at an address, read as host code. Checks nothing.", keeps_gil);
}

void bind_runtime(py::module_& floors) {
  py::class_<ManagedRuntime, std::shared_ptr<ManagedRuntime>>(floors, "ManagedRuntime")
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
      floors, "RecordingRuntime", "Host memory, every call recorded; the Nth call of a kind can be made to fail.")
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
      floors, "EmulatedRuntime", "The emulated accelerator's memory: residency, faults, queues, a modelled clock.")
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

void bind_allocator(py::module_& floors) {
  py::class_<OwnedBlock, std::shared_ptr<OwnedBlock>>(floors, "Block", "A block in a caller's hands.",
                                                      py::release_gil_before_calling_cpp_dtor())
      .def_property_readonly("address", unlocked([](const OwnedBlock& self) { return address_of(self.data()); }))
      .def_property_readonly("bytes",
                             unlocked([](const OwnedBlock& self) { return self.allocator().bytes(self.get()); }))
      .def_property_readonly("requested_bytes", unlocked(&OwnedBlock::requested_bytes))
      .def_property_readonly("home",
                             unlocked([](const OwnedBlock& self) { return self.allocator().home(self.get()).index; }))
      .def_property_readonly("stream",
                             unlocked([](const OwnedBlock& self) { return self.allocator().stream(self.get()); }))
      .def("free", &OwnedBlock::free, no_gil)
      .def(
          "record_stream",
          [](const OwnedBlock& self, Stream stream) { self.allocator().record_stream(self.get(), stream); },
          arg("stream"), no_gil)
      .def(
          "set_home",
          [](const OwnedBlock& self, int home, Stream stream) {
            self.allocator().set_home(self.get(), Location{home}, stream);
          },
          arg("home"), arg("stream"), no_gil)
      .def(
          "fill",
          [](const OwnedBlock& self, std::uint8_t value) { std::memset(self.data(), value, self.requested_bytes()); },
          arg("value"), "Writes `value` to every byte that was asked for, as host code.", no_gil)
      .def(
          "holds",
          [](const OwnedBlock& self, std::uint8_t value, std::size_t at_each_end) {
            const unsigned char* data = self.data();
            const std::size_t bytes = self.requested_bytes();
            const auto same = [value](unsigned char byte) { return byte == value; };
            if (bytes <= 2 * at_each_end) {
              return std::all_of(data, data + bytes, same);
            }
            return std::all_of(data, data + at_each_end, same) &&
                   std::all_of(data + bytes - at_each_end, data + bytes, same);
          },
          arg("value"), arg("at_each_end") = SIZE_MAX / 2,
          "Whether the bytes asked for are all `value`; `at_each_end` looks only at so many at each end.", no_gil);

  py::class_<OwnedAllocator, std::shared_ptr<OwnedAllocator>>(floors, "Allocator", "CachingManagedAllocator.",
                                                              py::release_gil_before_calling_cpp_dtor())
      .def(py::init([](std::shared_ptr<ManagedRuntime> runtime, bool managed, bool populate,
                       std::optional<std::size_t> max_split_bytes) {
             return without_gil([&] {
               auto self = std::make_shared<OwnedAllocator>();
               self->allocator = std::make_unique<CachingManagedAllocator>(*runtime, make_source(*runtime, managed),
                                                                           AllocatorOptions{populate, max_split_bytes});
               self->runtime = std::move(runtime);
               return self;
             });
           }),
           arg("runtime"), arg("managed") = true, arg("populate") = true, arg("max_split_bytes") = py::none(),
           no_gil_inside)
      .def(
          "allocate",
          [](const std::shared_ptr<OwnedAllocator>& self, std::size_t bytes, int home,
             Stream stream) -> std::shared_ptr<OwnedBlock> {
            Block* block = self->allocator->allocate(bytes, Location{home}, stream);
            return block == nullptr ? nullptr : std::make_shared<OwnedBlock>(self, block);
          },
          arg("bytes"), arg("home"), arg("stream"), "A Block, or None for 0 bytes.", no_gil)
      .def(
          "holds_address",
          [](const OwnedAllocator& self, std::uintptr_t address) {
            return self.allocator->find(pointer_of(address)) != nullptr;
          },
          arg("address"), "Whether a block in a caller's hands holds this address.", no_gil)
      .def(
          "empty_cache", [](const OwnedAllocator& self) { return self.allocator->empty_cache(); }, no_gil)
      .def(
          "statistics",
          [](const OwnedAllocator& self, std::optional<int> home) {
            const Statistics found = without_gil([&] { return self.allocator->statistics(location_of(home)); });
            py::dict flat;
            for (const auto& [key, value] : found.flatten()) {
              flat[py::str(key)] = value;
            }
            return flat;
          },
          arg("home") = py::none(), no_gil_inside)
      .def(
          "reset_peak_statistics",
          [](const OwnedAllocator& self, std::optional<int> home) {
            self.allocator->reset_peak_statistics(location_of(home));
          },
          arg("home") = py::none(), no_gil)
      .def(
          "reset_accumulated_statistics",
          [](const OwnedAllocator& self, std::optional<int> home) {
            self.allocator->reset_accumulated_statistics(location_of(home));
          },
          arg("home") = py::none(), no_gil)
      .def("snapshot", &snapshot_of, no_gil_inside)
      .def(
          "set_options",
          [](const OwnedAllocator& self, bool populate, std::optional<std::size_t> max_split_bytes) {
            self.allocator->set_options(AllocatorOptions{populate, max_split_bytes});
          },
          arg("populate"), arg("max_split_bytes"), no_gil)
      .def(
          "set_room_maker",
          [](OwnedAllocator& self, std::optional<py::function> function) {
            if (function) {
              self.room_makers.push_back(std::make_unique<PythonRoomMaker>(std::move(*function)));
            }
            RoomMaker* const maker = function ? self.room_makers.back().get() : nullptr;
            without_gil([&] { self.allocator->set_room_maker(maker); });
          },
          arg("function"), "function(bytes, home) -> bool is called when memory runs short; None takes it away.",
          no_gil_inside)
      .def("check", [](const OwnedAllocator& self) { return self.allocator->check(); }, no_gil);
}

} // namespace

void bind_floors(py::module_& module) {
  py::module_ floors = module.def_submodule("floors", "The floors below torch, for tests.");
  bind_values(floors);
  bind_runtime(floors);
  bind_allocator(floors);
}

} // namespace torch_uvm
