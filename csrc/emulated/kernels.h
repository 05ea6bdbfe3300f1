// The kernels that the accelerator has of its own; everything else is the CPU's (fallback.h).
#pragma once

#include <torch/library.h>

namespace torch_uvm::emulated {

void register_factories(torch::Library& aten); ///< factories.cpp: empty, set_, resize_, record_stream
void register_copies(torch::Library& aten); ///< copy.cpp: _copy_from, _local_scalar_dense
void register_attention(torch::Library& autograd, torch::Library& aten); ///< attention.cpp: the choice of a kernel
void register_recurrent(torch::Library& autograd, torch::Library& aten); ///< recurrent.cpp: LSTM and GRU
void register_dropout(torch::Library& autograd, torch::Library& aten); ///< dropout.cpp
void register_group_norm(torch::Library& autograd, torch::Library& aten); ///< group_norm.cpp
void register_group_norm_backward(torch::Library& autograd); ///< group_norm_backward.cpp
void register_integer_kernels(torch::Library& aten); ///< integers.cpp: what CUDA has for integers, and the CPU has not
void register_sparse(torch::Library& aten); ///< sparse.cpp: copies of sparse COO tensors
void register_nested(torch::Library& aten); ///< nested.cpp: copies of nested tensors
void register_autocast(torch::Library& autocast); ///< autocast.cpp

} // namespace torch_uvm::emulated
