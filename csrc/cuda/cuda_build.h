// Which CUDA this extension was compiled against. The CUDA floor is compiled only against a CUDA build of
// torch and a CUDA toolkit: callers ask for TORCH_UVM_WITH_CUDA before they include anything of it.
#pragma once

#include <string>

namespace torch_uvm {

/// The toolkit whose headers this was compiled with, as "13.0".
std::string cuda_toolkit_version();

} // namespace torch_uvm
