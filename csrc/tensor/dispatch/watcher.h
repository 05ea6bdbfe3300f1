// Observes operators and reports them to the residency engine.
//
// An at::RecordFunction callback runs before and after each operator, on the thread that runs it, in backward too. The
// callback is registered only while it is needed: the engine is awake (residency/engine/sleep.cpp), a graph capture is
// open, or deferred updates are pending. Even an empty callback slows a host-bound step down by a factor of 1.2 to 1.4.
//
// - The operands of a thread's outermost operator are made ready and pinned until it ends. A nested operator uses its
//   operands where they are, because the enclosing kernel may hold their pointers.
// - Views touch no bytes, and some wrapper tensors (functorch's, autograd's) have no storage. Such operators are
//   skipped, and the operators that they call count as outermost.
// - An operator writes the arguments that its schema declares mutable and those of observed_operators.h. A collective
// writes
//   all of its arguments.
// - The callbacks do not throw: PyTorch would swallow the exception.
#pragma once

namespace torch_uvm {

/// Registers the watcher for the process's engine (tensor/process/process_engine.h). Called once, when the extension is
/// loaded.
void register_watcher();

} // namespace torch_uvm
