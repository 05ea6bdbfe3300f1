// CUDA as the accelerator whose memory is managed.
#pragma once

namespace torch_uvm::cuda {

/// Makes CUDA the Context's backend. Nothing of CUDA is initialised yet.
/// \throws InvalidArgument where there is another backend
void register_backend();

/// Puts our allocator in the native one's place, in both of PyTorch's tables, once and for good: at any
/// time, CUDA may be in use already. Initialises CUDA, and makes the runtime: a process that is forked
/// later knows then whose the memory is.
void install_allocator();

} // namespace torch_uvm::cuda
