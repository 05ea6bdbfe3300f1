// Bindings for tests, in builds with TORCH_UVM_TEST_BINDINGS=1 only: calls of the emulated accelerator that fail,
// checks of invariants, and what the layers know.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "doubles/failing_calls.h"
#include "emulated/backend.h"
#include "python/bindings.h"
#include "tensor/dispatch/observed_operators.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/hints/owned_bytes.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"
#include "tensor/storage/user_allocators.h"

namespace torch_uvm {

namespace {

namespace py = pybind11;

EmulatedFailures& emulated_failures() {
  static auto* failures = new EmulatedFailures(emulated::runtime()); // leaked, as the runtime is
  return *failures;
}

std::vector<std::string> written_arguments(const std::string& name, const std::string& overload) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  const ObservedOperator observed(op.schema());
  std::vector<std::string> written;
  for (std::size_t i = 0; i < op.schema().arguments().size(); ++i) {
    if (observed.writes(i)) {
      written.push_back(op.schema().arguments()[i].name());
    }
  }
  return written;
}

using Pairs = std::vector<std::pair<std::uintptr_t, std::size_t>>;

Pairs pairs(const Ranges& ranges) {
  Pairs made;
  for (const Range& range : ranges) {
    made.emplace_back(range.begin, range.bytes());
  }
  return made;
}

py::object place(const std::optional<Location>& location) {
  return location ? py::object(py::int_(location->index)) : py::none();
}

py::dict attributes_dict(std::uintptr_t address, std::size_t bytes) {
  const RangeAttributes attributes = without_gil(
      [&] { return Context::get().runtime().range_attributes(reinterpret_cast<const void*>(address), bytes); });
  std::vector<int> accessed_by;
  for (const Location location : attributes.accessed_by) {
    accessed_by.push_back(location.index);
  }
  py::dict dict;
  dict["uniform"] = attributes.uniform;
  dict["read_mostly"] = attributes.read_mostly;
  dict["preferred_location"] = place(attributes.preferred_location);
  dict["accessed_by"] = accessed_by;
  dict["last_prefetch"] = place(attributes.last_prefetch);
  return dict;
}

/// The block's address, bytes and home; nullopt for a tensor that is not managed.
std::optional<std::tuple<std::uintptr_t, std::size_t, int>> block_values(const at::Tensor& tensor) {
  Block* const block = is_managed(data_of(tensor.storage())) ? block_of(data_of(tensor.storage())) : nullptr;
  if (block == nullptr) {
    return std::nullopt;
  }
  const CachingManagedAllocator& allocator = Context::get().managed_allocator();
  return std::tuple(reinterpret_cast<std::uintptr_t>(allocator.data(block)), allocator.bytes(block),
                    allocator.home(block).index);
}

#ifdef TORCH_UVM_SANITIZED
// Deliberate faults that prove a sanitizer is active. If neither is reported, the extension is not instrumented.

/// A data race: two threads write a variable without synchronisation.
int planted_race() {
  int written = 0;
  std::atomic<int> ready{0};
  const auto write = [&] {
    ready.fetch_add(1, std::memory_order_relaxed); // relaxed, so that it does not order the writes
    while (ready.load(std::memory_order_relaxed) != 2) {
      std::this_thread::yield();
    }
    ++written;
  };
  std::thread other(write);
  write();
  other.join();
  return written;
}

int planted_use_after_free() {
  auto owned = std::make_unique<int>(1);
  volatile const int* const freed = owned.get();
  owned.reset();
  return *freed;
}
#endif

} // namespace

void bind_test_bindings(py::module_& module) {
  module.def(
      "emu_fail_call", [](const std::string& name, std::size_t nth) { emulated_failures().fail(name, nth); },
      py::arg("name"), py::arg("nth"), no_gil);
  module.def("emu_clear_failures", [] { return emulated_failures().clear(); }, no_gil);
  module.def("emu_pending_operations", [] { return emulated::runtime().pending_operations(); }, no_gil);
  module.def("emu_live_objects", [] { return emulated::runtime().live_objects(); }, no_gil);
  // For tests of concurrency with a wait for a device.
  module.def("emu_hold_device", [](int device) { emulated::runtime().hold_device(device); }, py::arg("device"), no_gil);
  module.def(
      "emu_release_device", [](int device) { emulated::runtime().release_device(device); }, py::arg("device"), no_gil);
  module.def("emu_await_waiter", [] { emulated::runtime().await_waiter(); }, no_gil);
  module.def("emu_check_plain_allocator", [] { return emulated::plain_allocator().check(); }, no_gil);

  module.def("count_kernels", &count_kernels, py::arg("on"), no_gil); // false: as on CUDA
  module.def("is_watching", [] { return engine_in_use() != nullptr && engine_in_use()->is_awake(); }, no_gil);
  // As code does that is no operator and knows of no patch.
  module.def(
      "address", [](const at::Tensor& tensor) { return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()); },
      py::arg("tensor"), no_gil);
  module.def("known_operators", [] { return this_thread().known.size(); }, no_gil);
  module.def("written_arguments", &written_arguments, py::arg("name"), py::arg("overload") = "", no_gil);
  module.def("evict_after_operators", [](bool on) { made_engine().evict_after_operators(on); }, py::arg("on"), no_gil);
  // Whatever was requested.
  module.def("set_budget", &set_budget, py::arg("device"), py::arg("bytes"),
             py::arg("ceiling") = CachingManagedAllocator::kNoCeiling, no_gil);
  module.def(
      "set_host_limit", [](std::optional<std::size_t> bytes) { made_engine().set_host_limit(bytes); }, py::arg("bytes"),
      no_gil);
  module.def("fit_automatic_budget", &fit_automatic_budget, py::arg("device"), py::arg("wanted"), no_gil);
  module.def("release_idle_memory", &release_idle_memory, no_gil);
  module.def(
      "check_allocator",
      [] { return Context::get().in_use() ? Context::get().managed_allocator().check() : std::nullopt; }, no_gil);
  module.def(
      "check_residency", [] { return engine_in_use() == nullptr ? std::nullopt : engine_in_use()->check(); }, no_gil);

  // The ranges that hints apply to, as (address, bytes).
  module.def(
      "byte_runs", [](const at::Tensor& tensor, std::size_t gap) { return pairs(runs_of(tensor, gap)); },
      py::arg("tensor"), py::arg("gap") = 0, keeps_gil);
  module.def(
      "page_ranges",
      [](const std::vector<at::Tensor>& tensors, std::size_t page, std::size_t gap) {
        return pairs(page_ranges(owned_bytes(tensors, gap), page));
      },
      py::arg("tensors"), py::arg("page"), py::arg("gap") = 0, no_gil);
  module.def("range_attributes", &attributes_dict, py::arg("address"), py::arg("bytes"), no_gil_inside);
  module.def("block_of", &block_values, py::arg("tensor"), no_gil);
  module.def("pretend_not_concurrent", &Machine::pretend_not_concurrent, py::arg("pretend"), no_gil);
#ifdef TORCH_UVM_SANITIZED
  module.def("planted_race", &planted_race, "A data race, for ThreadSanitizer to find.", no_gil);
  module.def("planted_use_after_free", &planted_use_after_free, "A use after free, for AddressSanitizer to find.",
             no_gil);
#endif
}

} // namespace torch_uvm
