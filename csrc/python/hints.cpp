// Bindings of csrc/tensor/hints/hints.h. The hints themselves are registered as operators.
#include "python/bindings.h"

#include <torch/csrc/utils/pybind.h>

#include "tensor/hints/hints.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

} // namespace

void bind_hints(py::module_& module) {
  register_hints();
  module.def("has_bytes", &has_bytes, py::arg("tensor"), keeps_gil);
  module.def(
      "residency",
      [](const std::vector<at::Tensor>& tensors) {
        const auto places = without_gil([&] { return residency(tensors); });
        py::dict dict;
        for (const auto& [device, bytes] : places) {
          dict[py::cast(device)] = bytes;
        }
        return dict;
      },
      py::arg("tensors"), no_gil_inside);
}

} // namespace torch_uvm
