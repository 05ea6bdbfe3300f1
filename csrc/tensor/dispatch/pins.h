// Storages that have to be somewhere: complete where an address leaves PyTorch, on their device while they are pinned.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_uvm {

/// Before an address leaves PyTorch; ignored for storages that are not watched.
void settle(const at::Tensor& tensor);
/// Brings the storage to its device and holds it there, or lets go of it again. Ignored where no device has a budget.
void keep_resident(const at::Tensor& tensor, bool keep);

/// Tells the engine of storages that were there before there was a budget; what it knows, it can give up.
void make_known(const std::vector<at::Tensor>& tensors);

} // namespace torch_uvm
