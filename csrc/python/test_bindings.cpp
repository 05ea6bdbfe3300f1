// For tests, and in builds with TORCH_UVM_TEST_BINDINGS=1 only: calls of the emulated accelerator that fail, and how
// many operators this thread knows.
#include <torch/csrc/utils/pybind.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "emulated/backend.h"
#include "python/bindings.h"
#include "runtime/testing/failing_calls.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {

namespace {

namespace py = pybind11;

EmulatedFailures& emulated_failures() {
  static auto* failures = new EmulatedFailures(emulated::runtime()); // leaked, as the runtime is
  return *failures;
}

} // namespace

void bind_test_bindings(py::module_& module) {
  module.def(
      "emu_fail_call", [](const std::string& name, std::size_t nth) { emulated_failures().fail(name, nth); },
      py::arg("name"), py::arg("nth"), no_gil);
  module.def("emu_clear_failures", [] { return emulated_failures().clear(); }, no_gil);
  module.def("count_kernels", &count_kernels, py::arg("on"), no_gil); // false: as on CUDA
  module.def("is_watching", [] { return engine_in_use() != nullptr && engine_in_use()->is_awake(); }, no_gil);
  // As code does that is no operator and knows of no patch.
  module.def(
      "address", [](const at::Tensor& tensor) { return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()); },
      py::arg("tensor"), no_gil);
  module.def("known_operators", [] { return this_thread().known.size(); }, no_gil);
}

} // namespace torch_uvm
