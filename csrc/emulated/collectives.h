// torch.distributed collectives on the accelerator: gloo runs them on the same bytes, without a copy.
#pragma once

namespace torch_uvm::emulated {

/// Replaces PyTorch's kernels of the c10d operators: those pass the accelerator's tensors to gloo, which accepts only
/// tensors of the CPU and CUDA. Does nothing if torch was built without torch.distributed.
void register_collectives();

} // namespace torch_uvm::emulated
