// Bindings of csrc/tensor/host_tensors.h.
#include "tensor/host_tensors.h"

#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"

namespace torch_uvm {

void bind_host_tensors(pybind11::module_& module) {
  module.def("set_host_tensors", &set_host_tensors, pybind11::arg("on"));
  module.def("host_tensors", &host_tensors);
}

} // namespace torch_uvm
