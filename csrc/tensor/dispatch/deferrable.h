// Selects the parameter updates of an optimizer step that can be deferred.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "tensor/dispatch/deferred_updates.h"

namespace torch_uvm {

/// \param operands parameters, gradients and tensor state, one list each, all of the same length
/// \return the indices of the parameters whose update can be deferred, in ascending order, in groups that are updated
///         together. Empty if updating them in groups might not be bit-identical (foreach kernels look at all of their
///         tensors), or if written tensors share storage
std::vector<std::vector<std::size_t>> deferrable(const std::vector<std::vector<at::Tensor>>& operands);

/// `defer`, beside operators that other threads run. Takes the engine's lock.
void defer_beside_operators(std::vector<std::unique_ptr<DeferredUpdate>> updates);

} // namespace torch_uvm
