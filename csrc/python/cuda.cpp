// Bindings of csrc/cuda. In a build without CUDA the functions exist and throw.
#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"
#ifdef TORCH_UVM_WITH_CUDA
#include "cuda/cuda_backend.h"
#endif

namespace torch_uvm {

void bind_cuda(pybind11::module_& module) {
#ifdef TORCH_UVM_WITH_CUDA
  module.def("cuda_register", &cuda::register_backend, no_gil);
  module.def("cuda_install", &cuda::install_allocator, no_gil);
#else
  const auto refuse = [] { throw std::runtime_error("torch_uvm was built without CUDA"); };
  module.def("cuda_register", refuse, keeps_gil);
  module.def("cuda_install", refuse, keeps_gil);
#endif
}

} // namespace torch_uvm
