// Residency that callers request: materialising a storage before its address leaves PyTorch, and keep_resident.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace torch_uvm {

/// Materialises a tensor's bytes before its address leaves PyTorch: runs deferred updates and completes transfers. The
/// address stays valid until the next operator (Engine::materialise).
void materialise(const at::Tensor& tensor);
/// Fetches the storage to its device and pins it there, or unpins it. Pins count, and also without a budget: one may be
/// set while the pin lasts.
/// \throws OutOfMemory if there is no room, or if a running operator keeps using the storage on the host
void keep_resident(const at::Tensor& tensor, bool keep);

/// Whether the engine knows every storage on a device that it could evict.
bool knows_all();
/// Registers storages of accelerators with the engine that were created before the budget: it can evict only storages
/// that it knows.
void make_known(const std::vector<c10::Storage>& storages);

} // namespace torch_uvm
