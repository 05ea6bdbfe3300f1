// Refuses a resize of managed memory that cannot grow before the tensor changes.
#pragma once

namespace torch_uvm {

/// Overrides aten::resize_ for the CPU, and for CUDA in a CUDA build, with a check before PyTorch's own kernel.
/// PyTorch's kernel sets the tensor's sizes before the storage refuses to grow. The check also covers operators that
/// resize their `out=`. It costs one comparison for a resizable storage. Call once.
void register_resize_check();

} // namespace torch_uvm
