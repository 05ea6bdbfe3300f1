// The implementation of PyTorch's device guard: devices, streams and events of the emulated accelerator.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace torch_uvm::emulated {

/// The guard, a singleton. Leaked, because c10's registry keeps the pointer.
const c10::impl::DeviceGuardImplInterface* device_guard();

} // namespace torch_uvm::emulated
