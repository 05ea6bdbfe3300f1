// The backend fallback, which runs the CPU's kernels on the same bytes, and the operators with kernels of their own.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
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

/// Runs the operator's CPU kernel on CPU aliases of its operands and relabels the results as the accelerator's. Copies
/// no bytes. Each operand counts as an access to its pages by the device.
/// \tparam kernel the kernel's dispatch key: CPU, or SparseCPU or NestedTensorCPU for such operands
/// \throws c10::Error for operands on different devices, as CUDA does
template <c10::DispatchKey kernel>
void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// For compressed sparse and quantised tensors, which the accelerator does not support.
/// \throws c10::NotImplementedError
void unsupported_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

void register_factories(torch::Library& aten); ///< factories.cpp: empty, set_, resize_, record_stream
void register_copies(torch::Library& aten); ///< copy.cpp: _copy_from, _local_scalar_dense
/// by_device.cpp: what PyTorch implements by device
void register_by_device(torch::Library& autograd, torch::Library& aten);
void register_sparse(torch::Library& aten); ///< sparse.cpp: copies of sparse COO tensors
void register_nested(torch::Library& aten); ///< nested.cpp: copies of nested tensors
void register_autocast(torch::Library& autocast); ///< autocast.cpp

} // namespace torch_uvm::emulated
