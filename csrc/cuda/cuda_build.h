// The CUDA version that this extension was compiled against. The CUDA layer is compiled only with a CUDA build of torch
// and a CUDA toolkit: test TORCH_UVM_WITH_CUDA before including any of its headers.
#pragma once

#include <string>

namespace torch_uvm {

/// The version of the toolkit headers, as in "13.0".
std::string cuda_toolkit_version();

} // namespace torch_uvm
