// Kernels of the accelerator's own. All other operators run the CPU's kernels (fallback.h).
#pragma once

#include <torch/library.h>

namespace torch_uvm::emulated {

void register_factories(torch::Library& aten); ///< factories.cpp: empty, set_, resize_, record_stream
void register_copies(torch::Library& aten); ///< copy.cpp: _copy_from, _local_scalar_dense
/// by_device.cpp: what PyTorch implements by device
void register_by_device(torch::Library& autograd, torch::Library& aten);
void register_sparse(torch::Library& aten); ///< sparse.cpp: copies of sparse COO tensors
void register_nested(torch::Library& aten); ///< nested.cpp: copies of nested tensors
void register_autocast(torch::Library& autocast); ///< autocast.cpp

} // namespace torch_uvm::emulated
