// The autograd view of a moved tensor: a view of the source's base.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace torch_uvm {

/// Makes `moved` a differentiable view of `self`, or of the base of `self` if that is a view.
///
/// PyTorch's as_view would chain each move onto the view function of `self`, and copy the chain: a tensor that is moved
/// back and forth would get slower with each move, and in the end overflow the stack. Here the view function stays as
/// short as that of a view that was never moved.
/// \param moved the result of the move kernel for `self`, not used by anything else yet
at::Tensor as_moved_view(const at::Tensor& self, const at::Tensor& moved);

} // namespace torch_uvm
