// Whether a tensor is managed, whatever wraps it.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_uvm {

/// Whether the bytes of `tensor` are managed. The wrappers of vmap and grad are seen through; tensors that
/// have no bytes (meta, fake, functional, sparse), and nested ones, which are made of others, are not managed.
bool is_managed(const at::Tensor& tensor);

} // namespace torch_uvm
