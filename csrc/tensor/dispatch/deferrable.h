// Which parameters' updates may wait, of those that an optimizer is about to make.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

namespace torch_uvm {

/// \param operands parameters, gradients and what there is of state beside numbers, a list each of the same length
/// \return the indices of those whose update can be deferred, in order. None where to run them one by one could
///         change a bit (kernels for lists look at all of their tensors), or where they share bytes
std::vector<std::size_t> deferrable(const std::vector<std::vector<at::Tensor>>& operands);

} // namespace torch_uvm
