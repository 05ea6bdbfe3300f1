// Bindings of csrc/tensor/hints.h.
#include "python/bindings.h"

#include <torch/csrc/utils/pybind.h>

namespace torch_uvm {

void bind_hints(pybind11::module_& /*module*/) {}

} // namespace torch_uvm
