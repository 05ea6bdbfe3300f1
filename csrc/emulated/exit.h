// What has to be over before the interpreter goes.
#pragma once

namespace torch_uvm::emulated {

/// Waits until autograd's device threads have let go of the backward passes that are over.
///
/// backward() returns when its gradients are there, and the device's thread drops the pass a little later:
/// with it a Python object, for which it takes the GIL. If the interpreter is ending by then, Python ends
/// the thread inside a destructor, and the process aborts. Called at exit, without the GIL.
void finish_backward_threads() noexcept;

} // namespace torch_uvm::emulated
