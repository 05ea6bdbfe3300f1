// Devices, streams and events of the emulated accelerator, as PyTorch's guards use them.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torch_uvm::emulated {

/// The process's one guard; leaked, as c10's registry wants it.
const c10::impl::DeviceGuardImplInterface* device_guard();

} // namespace torch_uvm::emulated
