// The implementation of PyTorch's accelerator hooks, which its device-independent code calls.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace torch_uvm::emulated {

/// The hooks, a singleton. Leaked, because PyTorch keeps the pointer.
at::PrivateUse1HooksInterface* hooks();

} // namespace torch_uvm::emulated
