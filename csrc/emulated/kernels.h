// The kernels that the accelerator has of its own; everything else is the CPU's (fallback.h).
#pragma once

#include <torch/library.h>

namespace torch_uvm::emulated {

void register_factories(torch::Library& aten); ///< factories.cpp: empty, set_, resize_, record_stream
void register_copies(torch::Library& aten); ///< copy.cpp: _copy_from, _local_scalar_dense
void register_attention(torch::Library& aten); ///< attention.cpp: the choice of an attention kernel
void register_recurrent(torch::Library& autograd, torch::Library& aten); ///< recurrent.cpp: LSTM and GRU
void register_dropout(torch::Library& autograd, torch::Library& aten); ///< dropout.cpp
void register_autocast(torch::Library& autocast); ///< autocast.cpp

} // namespace torch_uvm::emulated
