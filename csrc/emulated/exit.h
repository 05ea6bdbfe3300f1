// Synchronisation with autograd's threads before the interpreter ends.
#pragma once

namespace torch_uvm::emulated {

/// Waits until autograd's device threads have released all finished backward passes. Called at exit, without the GIL.
///
/// backward() returns when the gradients are ready. The device's thread destroys the pass a little later, which takes
/// the GIL to release a Python object. If the interpreter is ending by then, Python terminates the thread inside a
/// destructor, and the process aborts.
void finish_backward_threads() noexcept;

} // namespace torch_uvm::emulated
