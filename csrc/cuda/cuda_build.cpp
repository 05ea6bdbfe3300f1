#include "cuda/cuda_build.h"

#include <cuda_runtime_api.h>

namespace torch_uvm {

std::string cuda_toolkit_version() {
  // CUDART_VERSION is 1000 * major + 10 * minor.
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

} // namespace torch_uvm
