// The CUDA backend. The CUDA layer is compiled only with a CUDA build of torch:
// test TORCH_UVM_WITH_CUDA before including any of its headers.
#pragma once

namespace torch_uvm::cuda {

/// Makes CUDA the Context's backend. Does not initialise CUDA: creating the runtime does. That also replaces PyTorch's
/// CUDA allocator by ours in both of PyTorch's tables, permanently, even if CUDA is in use. A
/// process that is forked later knows then that the memory belongs to its parent.
/// \throws InvalidArgument if another backend is set
void register_backend();

} // namespace torch_uvm::cuda
