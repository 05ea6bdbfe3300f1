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

#include "allocator/caching_managed_allocator.h"
#include "python/bindings.h"
#include "runtime/emulated_runtime.h"
#include "runtime/recording_runtime.h"

namespace torch_uvm {

namespace {

namespace py = pybind11;
using py::arg;
using Unlocked = py::call_guard<py::gil_scoped_release>;

std::uintptr_t address_of(const void* ptr) {
  return reinterpret_cast<std::uintptr_t>(ptr);
}

void* pointer_of(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

/// Calls back into Python for room.
class PythonRoomMaker final : public RoomMaker {
 public:
  explicit PythonRoomMaker(py::function function) : function_(std::move(function)) {}
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
  py::list segments;
  for (const SegmentInfo& segment : self.allocator->snapshot()) {
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
      .def_static("host", &Stream::host)
      .def_static("default_of", &Stream::default_of, arg("device"))
      .def_readonly("device", &Stream::device)
      .def("__eq__", [](const Stream& self, const Stream& other) { return self == other; })
      .def("__hash__", [](const Stream& self) { return std::hash<Stream>{}(self); })
      .def("__repr__", [](const Stream& self) {
        return py::str("Stream(device={}, handle={:#x})").format(self.device, address_of(self.handle));
      });

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
      arg("address"), arg("contents"), "Writes bytes at an address, as host code. Checks nothing.");
  floors.def(
      "read",
      [](std::uintptr_t address, std::size_t count) {
        return py::bytes(static_cast<const char*>(pointer_of(address)), count);
      },
      arg("address"), arg("count"), "The bytes at an address, read as host code. Checks nothing.");
}

void bind_runtime(py::module_& floors) {
  py::class_<ManagedRuntime, std::shared_ptr<ManagedRuntime>>(floors, "ManagedRuntime")
      .def_property_readonly("name", &ManagedRuntime::name)
      .def(
          "allocate_managed",
          [](ManagedRuntime& self, std::size_t bytes, int home) {
            return address_of(self.allocate_managed(bytes, Location{home}));
          },
          arg("bytes"), arg("home"), Unlocked())
      .def(
          "free_managed", [](ManagedRuntime& self, std::uintptr_t address) { self.free_managed(pointer_of(address)); },
          arg("address"), Unlocked())
      .def_property("limit", &ManagedRuntime::limit, &ManagedRuntime::set_limit)
      .def_property_readonly("managed_bytes", &ManagedRuntime::managed_bytes)
      .def_property_readonly("peak_managed_bytes", &ManagedRuntime::peak_managed_bytes)
      .def_property_readonly("device_count", &ManagedRuntime::device_count)
      .def_property_readonly("host_memory_available", &ManagedRuntime::host_memory_available)
      .def(
          "prefetch",
          [](ManagedRuntime& self, std::uintptr_t address, std::size_t bytes, int to, Stream stream) {
            self.prefetch(pointer_of(address), bytes, Location{to}, stream);
          },
          arg("address"), arg("bytes"), arg("to"), arg("stream"), Unlocked())
      .def(
          "advise",
          [](ManagedRuntime& self, std::uintptr_t address, std::size_t bytes, Advice advice, int location) {
            self.advise(pointer_of(address), bytes, advice, Location{location});
          },
          arg("address"), arg("bytes"), arg("advice"), arg("location"), Unlocked())
      .def(
          "discard",
          [](ManagedRuntime& self, std::uintptr_t address, std::size_t bytes, Stream stream) {
            self.discard(pointer_of(address), bytes, stream);
          },
          arg("address"), arg("bytes"), arg("stream"), Unlocked())
      .def(
          "copy_async",
          [](ManagedRuntime& self, std::uintptr_t dst, std::uintptr_t src, std::size_t bytes, Stream stream) {
            self.copy_async(pointer_of(dst), pointer_of(src), bytes, stream);
          },
          arg("dst"), arg("src"), arg("bytes"), arg("stream"), Unlocked())
      .def("create_stream", &ManagedRuntime::create_stream, arg("device"), arg("priority") = 0, Unlocked())
      .def("destroy_stream", &ManagedRuntime::destroy_stream, arg("stream"), Unlocked())
      .def("query_stream", &ManagedRuntime::query_stream, arg("stream"), Unlocked())
      .def("synchronize_stream", &ManagedRuntime::synchronize_stream, arg("stream"), Unlocked())
      .def("synchronize_device", &ManagedRuntime::synchronize_device, arg("device"), Unlocked())
      .def("create_event", &ManagedRuntime::create_event, arg("device"), arg("timing") = false, Unlocked())
      .def("destroy_event", &ManagedRuntime::destroy_event, arg("event"), Unlocked())
      .def("record_event", &ManagedRuntime::record_event, arg("event"), arg("stream"), Unlocked())
      .def("query_event", &ManagedRuntime::query_event, arg("event"), Unlocked())
      .def("synchronize_event", &ManagedRuntime::synchronize_event, arg("event"), Unlocked())
      .def("wait_event", &ManagedRuntime::wait_event, arg("stream"), arg("event"), Unlocked());

  py::class_<RecordingRuntime, ManagedRuntime, std::shared_ptr<RecordingRuntime>>(
      floors, "RecordingRuntime", "Host memory, every call recorded; the Nth call of a kind can be made to fail.")
      .def(py::init<int>(), arg("devices") = 1)
      .def(
          "calls",
          [](const RecordingRuntime& self) {
            py::list calls;
            for (const RecordedCall& call : self.calls()) {
              calls.append(py::dict(arg("name") = call.name, arg("address") = address_of(call.ptr),
                                    arg("bytes") = call.bytes, arg("location") = call.location.index,
                                    arg("stream") = call.stream, arg("failed") = call.failed));
            }
            return calls;
          },
          "Every call since `clear_calls`, oldest first, as dicts.")
      .def("count", &RecordingRuntime::count, arg("name"))
      .def("clear_calls", &RecordingRuntime::clear_calls)
      .def("fail", &RecordingRuntime::fail, arg("name"), arg("nth"))
      .def("clear_failures", &RecordingRuntime::clear_failures)
      .def("hold", &RecordingRuntime::hold, arg("stream"))
      .def("release", &RecordingRuntime::release, arg("stream"))
      .def("set_host_memory_available", &RecordingRuntime::set_host_memory_available, arg("bytes"))
      .def("live_objects", &RecordingRuntime::live_objects);

  py::class_<EmulatedRuntime, ManagedRuntime, std::shared_ptr<EmulatedRuntime>>(
      floors, "EmulatedRuntime", "The emulated accelerator's memory: residency, faults, queues, a modelled clock.")
      .def(py::init([](int devices, std::size_t memory, std::string profile, std::optional<std::uint64_t> seed) {
             return std::make_shared<EmulatedRuntime>(EmulatedConfig{devices, memory, std::move(profile), seed});
           }),
           arg("devices") = 1, arg("memory") = 256 * std::size_t{1 << 20}, arg("profile") = "h200",
           arg("seed") = py::none())
      .def_property_readonly_static("PAGE_BYTES", [](const py::object&) { return EmulatedRuntime::kPageBytes; })
      .def("pending_operations", &EmulatedRuntime::pending_operations)
      .def("resident_bytes", &EmulatedRuntime::resident_bytes, arg("device"))
      .def("time_us", &EmulatedRuntime::time_us, "The latest of all clocks; modelled.");
}

void bind_allocator(py::module_& floors) {
  py::class_<OwnedBlock, std::shared_ptr<OwnedBlock>>(floors, "Block", "A block in a caller's hands.")
      .def_property_readonly("address", [](const OwnedBlock& self) { return address_of(self.data()); })
      .def_property_readonly("bytes", [](const OwnedBlock& self) { return self.allocator().bytes(self.get()); })
      .def_property_readonly("requested_bytes", &OwnedBlock::requested_bytes)
      .def_property_readonly("home", [](const OwnedBlock& self) { return self.allocator().home(self.get()).index; })
      .def_property_readonly("stream", [](const OwnedBlock& self) { return self.allocator().stream(self.get()); })
      .def("free", &OwnedBlock::free, Unlocked())
      .def(
          "record_stream",
          [](const OwnedBlock& self, Stream stream) { self.allocator().record_stream(self.get(), stream); },
          arg("stream"), Unlocked())
      .def(
          "set_home",
          [](const OwnedBlock& self, int home, Stream stream) {
            self.allocator().set_home(self.get(), Location{home}, stream);
          },
          arg("home"), arg("stream"), Unlocked())
      .def(
          "fill",
          [](const OwnedBlock& self, std::uint8_t value) { std::memset(self.data(), value, self.requested_bytes()); },
          arg("value"), "Writes `value` to every byte that was asked for, as host code.", Unlocked())
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
          "Whether the bytes asked for are all `value`; `at_each_end` looks only at so many at each end.", Unlocked());

  py::class_<OwnedAllocator, std::shared_ptr<OwnedAllocator>>(floors, "Allocator", "CachingManagedAllocator.")
      .def(py::init([](std::shared_ptr<ManagedRuntime> runtime, bool managed, bool populate,
                       std::optional<std::size_t> max_split_bytes) {
             auto self = std::make_shared<OwnedAllocator>();
             self->allocator = std::make_unique<CachingManagedAllocator>(*runtime, make_source(*runtime, managed),
                                                                         AllocatorOptions{populate, max_split_bytes});
             self->runtime = std::move(runtime);
             return self;
           }),
           arg("runtime"), arg("managed") = true, arg("populate") = true, arg("max_split_bytes") = py::none())
      .def(
          "allocate",
          [](const std::shared_ptr<OwnedAllocator>& self, std::size_t bytes, int home,
             Stream stream) -> std::shared_ptr<OwnedBlock> {
            Block* block = self->allocator->allocate(bytes, Location{home}, stream);
            return block == nullptr ? nullptr : std::make_shared<OwnedBlock>(self, block);
          },
          arg("bytes"), arg("home"), arg("stream"), "A Block, or None for 0 bytes.", Unlocked())
      .def(
          "holds_address",
          [](const OwnedAllocator& self, std::uintptr_t address) {
            return self.allocator->find(pointer_of(address)) != nullptr;
          },
          arg("address"), "Whether a block in a caller's hands holds this address.")
      .def(
          "empty_cache", [](const OwnedAllocator& self) { return self.allocator->empty_cache(); }, Unlocked())
      .def(
          "statistics",
          [](const OwnedAllocator& self, std::optional<int> home) {
            py::dict flat;
            for (const auto& [key, value] : self.allocator->statistics(location_of(home)).flatten()) {
              flat[py::str(key)] = value;
            }
            return flat;
          },
          arg("home") = py::none())
      .def(
          "reset_peak_statistics",
          [](const OwnedAllocator& self, std::optional<int> home) {
            self.allocator->reset_peak_statistics(location_of(home));
          },
          arg("home") = py::none())
      .def(
          "reset_accumulated_statistics",
          [](const OwnedAllocator& self, std::optional<int> home) {
            self.allocator->reset_accumulated_statistics(location_of(home));
          },
          arg("home") = py::none())
      .def("snapshot", &snapshot_of)
      .def(
          "set_options",
          [](const OwnedAllocator& self, bool populate, std::optional<std::size_t> max_split_bytes) {
            self.allocator->set_options(AllocatorOptions{populate, max_split_bytes});
          },
          arg("populate"), arg("max_split_bytes"))
      .def(
          "set_room_maker",
          [](OwnedAllocator& self, std::optional<py::function> function) {
            if (function) {
              self.room_makers.push_back(std::make_unique<PythonRoomMaker>(std::move(*function)));
            }
            self.allocator->set_room_maker(function ? self.room_makers.back().get() : nullptr);
          },
          arg("function"), "function(bytes, home) -> bool is called when memory runs short; None takes it away.")
      .def("check", [](const OwnedAllocator& self) { return self.allocator->check(); });
}

} // namespace

void bind_floors(py::module_& module) {
  py::module_ floors = module.def_submodule("floors", "The floors below torch, for tests.");
  bind_values(floors);
  bind_runtime(floors);
  bind_allocator(floors);
}

} // namespace torch_uvm
