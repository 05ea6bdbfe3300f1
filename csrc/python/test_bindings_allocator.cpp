// CachingManagedAllocator for tests. A block is an object that frees itself when it is destroyed, so a failing test
// leaks no block.
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
#include "python/test_bindings.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;
using py::arg;

/// A memory-pressure callback implemented in Python.
class PythonPressureCallback final : public PressureCallback {
 public:
  explicit PythonPressureCallback(py::function function) : function_(std::move(function)) {}
  ~PythonPressureCallback() override { // the allocator is destroyed without the GIL
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

/// An allocator with its runtime and callbacks. Members are destroyed in reverse order: the allocator first.
struct OwnedAllocator {
  std::shared_ptr<ManagedRuntime> runtime;
  std::vector<std::unique_ptr<PythonPressureCallback>>
      pressure_callbacks; ///< including removed ones, which may still be running
  std::unique_ptr<CachingManagedAllocator> allocator;
};

/// A block owned by Python.
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
    get(); // throws if the block was freed before
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

} // namespace

void bind_test_allocator(py::module_& classes) {
  py::class_<OwnedBlock, std::shared_ptr<OwnedBlock>>(classes, "Block", "A block in a caller's hands.",
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

  py::class_<OwnedAllocator, std::shared_ptr<OwnedAllocator>>(classes, "Allocator", "CachingManagedAllocator.",
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
          "set_pressure_callback",
          [](OwnedAllocator& self, std::optional<py::function> function) {
            if (function) {
              self.pressure_callbacks.push_back(std::make_unique<PythonPressureCallback>(std::move(*function)));
            }
            PressureCallback* const maker = function ? self.pressure_callbacks.back().get() : nullptr;
            without_gil([&] { self.allocator->set_pressure_callback(maker); });
          },
          arg("function"), "function(bytes, home) -> bool is called when memory runs short; None takes it away.",
          no_gil_inside)
      .def("check", [](const OwnedAllocator& self) { return self.allocator->check(); }, no_gil);
}

} // namespace torch_uvm
