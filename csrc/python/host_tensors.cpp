// Bindings of csrc/tensor/storage/host_tensors.h: managed memory for CPU tensors.
#include "tensor/storage/host_tensors.h"

#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"

namespace torch_uvm {

void bind_host_tensors(pybind11::module_& module) {
  module.def("set_host_tensors", &set_host_tensors, pybind11::arg("on"), no_gil);
  module.def("host_tensors", &host_tensors, keeps_gil);
}

} // namespace torch_uvm
