// Whether a tensor is managed, looking through functorch wrappers.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_uvm {

/// Whether the bytes of `tensor` are managed. Looks through the wrappers of vmap and grad. False for tensors without
/// bytes of their own: meta, fake, functional, sparse and nested tensors.
bool is_managed(const at::Tensor& tensor);

} // namespace torch_uvm
