// The backend fallback: operators without a kernel of their own run the CPU's kernel on the same bytes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "emulated/operands.h"
#include "emulated/operator_info.h"

namespace torch_uvm::emulated {

/// Runs the operator's CPU kernel on CPU aliases of its operands and relabels the results as the accelerator's. Copies
/// no bytes. Each operand counts as an access to its pages by the device.
/// \throws c10::Error for operands on different devices, as CUDA does
void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The same for operators with sparse or nested operands: run the CPU's sparse or nested kernel.
void sparse_cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void nested_cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// For compressed sparse and quantised tensors, which the accelerator does not support.
/// \throws c10::NotImplementedError
void unsupported_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The common device of an operator's arguments, which are the last `info.arguments.size()` values of the stack.
/// \throws c10::Error for the combinations of devices that CUDA refuses
int common_device(const c10::OperatorHandle& op, const OperatorInfo& info, const torch::jit::Stack& stack);

/// Replaces the accelerator's tensors, generators and devices among the arguments by the CPU's. Appends each tensor's
/// access to `accesses`.
void arguments_to_cpu(const OperatorInfo& info, int device, torch::jit::Stack* stack, Operands& operands,
                      c10::SmallVectorImpl<Touch>& accesses);

/// Replaces the CPU tensors among the last `info.returns` values of the stack by the accelerator's.
void returns_to_device(const OperatorInfo& info, torch::jit::Stack* stack, Operands& operands);

} // namespace torch_uvm::emulated
