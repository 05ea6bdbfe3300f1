// The rates of a device's link.
#pragma once

#include "residency/policy/decision.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Measures them with copies between pinned and device memory, each direction on a stream of its own, alone and beside
/// the other. Waits for the copies: some 20 ms. \return the defaults where memory or the runtime refuses
LinkRates measure_link(ManagedRuntime& runtime, Stream into, Stream out) noexcept;

} // namespace torch_uvm
