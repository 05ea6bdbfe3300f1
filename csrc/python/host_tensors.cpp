// Bindings of csrc/tensor/host_tensors.h.
#include "python/bindings.h"

#include <torch/csrc/utils/pybind.h>

namespace torch_uvm {

void bind_host_tensors(pybind11::module_& /*module*/) {}

} // namespace torch_uvm
