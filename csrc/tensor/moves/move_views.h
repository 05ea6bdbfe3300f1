// What a moved tensor is to autograd: a view of what its source is a view of.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace torch_uvm {

/// Makes `moved` a differentiable view: of `self`, or of its base where `self` is a view itself.
///
/// PyTorch's own as_view would append to how `self` came from that base, and copy it each time: a tensor
/// that goes back and forth would get slower with each move, and overflow the stack in the end. Here the way
/// from the base stays as short as that of a view that was never moved.
/// \param moved what the kernel of a move made of `self`; nobody has seen it yet
at::Tensor as_moved_view(const at::Tensor& self, const at::Tensor& moved);

} // namespace torch_uvm
