// Resizing managed memory that cannot grow: refused before anything has changed.
#pragma once

namespace torch_uvm {

/// Puts a check before PyTorch's own aten::resize_ for the CPU, and for CUDA where PyTorch has it: they set a
/// tensor's sizes before its storage refuses to grow. Operators that resize their `out=` go the same way. Memory that
/// is not managed goes on to PyTorch after one comparison. Once a process; calling it again does nothing.
void register_resize_check();

} // namespace torch_uvm
