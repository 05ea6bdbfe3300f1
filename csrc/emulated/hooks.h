// What PyTorch's device-independent code asks of an accelerator.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace torch_uvm::emulated {

/// The process's one set of hooks; leaked.
at::PrivateUse1HooksInterface* hooks();

} // namespace torch_uvm::emulated
