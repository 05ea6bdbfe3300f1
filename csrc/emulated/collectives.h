// torch.distributed's collectives on the accelerator: gloo's, on the same bytes.
#pragma once

namespace torch_uvm::emulated {

/// Takes the place of PyTorch's kernels for operators of c10d: theirs would hand the accelerator's tensors to a
/// backend, and gloo takes none but the CPU's and CUDA's. Does nothing where torch was built without.
void register_collectives();

} // namespace torch_uvm::emulated
