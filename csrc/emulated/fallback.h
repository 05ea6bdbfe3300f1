// Every operator that the accelerator has no kernel of its own for: the CPU's, on the same bytes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "emulated/operands.h"
#include "emulated/operator_info.h"

namespace torch_uvm::emulated {

/// Runs the operator's CPU kernel on aliases of its operands and gives its results the accelerator's
/// label. No bytes are copied. Each operand counts as a touch of its pages by the device.
/// \throws c10::Error, as CUDA does, for operands on several devices
void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The same for operators that sparse or nested tensors take part in: the CPU's kernel for these.
void sparse_cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void nested_cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// For compressed sparse and quantised tensors, which the accelerator has not.
/// \throws c10::NotImplementedError
void unsupported_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// The device of an operator's arguments, the last `info.arguments.size()` of the stack, after the
/// checks that CUDA makes.
int common_device(const c10::OperatorHandle& op, const OperatorInfo& info, const torch::jit::Stack& stack);

/// Replaces the accelerator's tensors, generators and devices among the arguments by the CPU's, and
/// adds each tensor's access to `accesses`.
void arguments_to_cpu(const OperatorInfo& info, int device, torch::jit::Stack* stack, Operands& operands,
                      c10::SmallVectorImpl<Touch>& accesses);

/// Replaces the last `info.returns` values of the stack by the accelerator's.
void returns_to_device(const OperatorInfo& info, torch::jit::Stack* stack, Operands& operands);

} // namespace torch_uvm::emulated
