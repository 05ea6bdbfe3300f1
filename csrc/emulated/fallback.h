// The backend fallback: operators without a kernel of their own run the CPU's kernel on the same bytes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace torch_uvm::emulated {

/// Runs the operator's CPU kernel on CPU aliases of its operands and relabels the results as the accelerator's. Copies
/// no bytes. Each operand counts as an access to its pages by the device.
/// \tparam kernel the kernel's key: the CPU's, or for operators with sparse or nested operands, its sparse or nested
/// one
/// \throws c10::Error for operands on different devices, as CUDA does
template <c10::DispatchKey kernel>
void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// For compressed sparse and quantised tensors, which the accelerator does not support.
/// \throws c10::NotImplementedError
void unsupported_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

} // namespace torch_uvm::emulated
