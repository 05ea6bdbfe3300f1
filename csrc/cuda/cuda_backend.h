// The CUDA backend. The CUDA layer is compiled only with a CUDA build of torch:
// test TORCH_UVM_WITH_CUDA before including any of its headers.
#pragma once

namespace torch_uvm::cuda {

/// Makes CUDA the Context's backend. Does not initialise CUDA.
/// \throws InvalidArgument if another backend is set
void register_backend();

/// Replaces PyTorch's CUDA allocator by ours in both of PyTorch's tables, once per process and permanently. May be
/// called at any time, even if CUDA is in use. Initialises CUDA and creates the runtime, so that a process that is
/// forked later knows that the memory belongs to its parent.
void install_allocator();

} // namespace torch_uvm::cuda
