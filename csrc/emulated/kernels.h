// Kernels of the accelerator's own. All other operators run the CPU's kernels (fallback.h).
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <string_view>

namespace torch_uvm::emulated {

/// Calls `visit` with the name and handle of each operator of the namespace ("aten::") that has a kernel for the key.
template <class Visit>
void for_each_operator(std::string_view name_space, c10::DispatchKey key, const Visit& visit) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (op && name.name.starts_with(name_space) && op->hasKernelForDispatchKey(key)) {
      visit(name, *op);
    }
  }
}

void register_factories(torch::Library& aten); ///< factories.cpp: empty, set_, resize_, record_stream
void register_copies(torch::Library& aten); ///< copy.cpp: _copy_from, _local_scalar_dense
/// by_device.cpp: what PyTorch implements by device
void register_by_device(torch::Library& autograd, torch::Library& aten);
void register_sparse(torch::Library& aten); ///< sparse.cpp: copies of sparse COO tensors
void register_nested(torch::Library& aten); ///< nested.cpp: copies of nested tensors
void register_autocast(torch::Library& autocast); ///< autocast.cpp

} // namespace torch_uvm::emulated
