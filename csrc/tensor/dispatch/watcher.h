// Sees operators go by, and tells the residency engine.
//
// A callback of at::RecordFunction runs before and after each operator, on the thread that runs it, in backward too. It
// is there only while a device has a budget that steps may run against (residency/engine/sleep.cpp): with a callback
// that does nothing, a step that is bound by the host takes 1.2 to 1.4 times as long.
//
// - An outermost operator of a thread has its operands made ready, and held until it ends. Operators within it find
//   theirs where they are: an enclosing kernel may hold the pointers.
// - Views touch no bytes, and some wrappers (functorch's, autograd's) hold tensors with no storage: what is within
//   them is outermost.
// - What an operator writes is what its schema says, and running statistics of a batch norm, of which it says nothing.
// - It throws nothing: PyTorch would swallow it.
#pragma once

namespace torch_uvm {

/// Registers the watcher with the process's engine (tensor/process/process_engine.h). Once, as the extension is loaded.
void register_watcher();

} // namespace torch_uvm
