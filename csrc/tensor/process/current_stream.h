// The calling thread's current streams, as the runtime knows them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "runtime/location.h"

namespace torch_uvm {

/// \param device of an accelerator, with its index
inline Stream current_stream_of(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return {device.index(), guard.getStreamNativeHandle(guard.getStream(device))};
}

} // namespace torch_uvm
