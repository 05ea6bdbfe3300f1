// Kernels of the accelerator's own. All other operators run the CPU's kernels (fallback.h).
#pragma once

#include <torch/library.h>

namespace torch_uvm::emulated {

void register_factories(torch::Library& aten); ///< factories.cpp: empty, set_, resize_, record_stream
void register_copies(torch::Library& aten); ///< copy.cpp: _copy_from, _local_scalar_dense
void register_attention(torch::Library& aten); ///< attention.cpp: choice of the kernel
void register_recurrent(torch::Library& autograd, torch::Library& aten); ///< recurrent.cpp: cells of LSTM and GRU
void register_dropout(torch::Library& autograd, torch::Library& aten); ///< dropout.cpp
void register_integer_kernels(torch::Library& aten); ///< integers.cpp: integer kernels that only CUDA has
void register_sparse(torch::Library& aten); ///< sparse.cpp: copies of sparse COO tensors
void register_nested(torch::Library& aten); ///< nested.cpp: copies of nested tensors
void register_autocast(torch::Library& autocast); ///< autocast.cpp

} // namespace torch_uvm::emulated
