// The operators in namespace torch_uvm that make tensors: a move, and a copy into managed memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

namespace torch_uvm {

/// New managed memory labelled with `device`, whatever the switch says.
/// \throws c10::Error where there is none; c10::OutOfMemoryError where it is refused
at::Tensor empty_strided_managed(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype,
                                 c10::Device device);

/// A copy of `self` in new managed memory: the functional form of a move. Differentiable.
/// \param device the CPU, or a device of the accelerator
/// \param non_blocking as in torch.Tensor.to
/// \param memory_format preserve keeps the strides of a dense tensor; else as in torch.Tensor.to
at::Tensor managed_copy(const at::Tensor& self, c10::Device device, c10::ScalarType dtype, bool non_blocking,
                        c10::MemoryFormat memory_format);

/// Registers torch_uvm::move and torch_uvm::managed_copy with their derivatives; calling it again does
/// nothing. Fake kernels and batching rules: torch_uvm/_tensors/operators.py.
void register_operators();

// The kernels: moves.cpp, managed_copy.cpp, moves_autograd.cpp. Those with a key set are for keys above the
// devices', and hand on to the next.

at::Tensor move_kernel(const at::Tensor& self, c10::Device device, bool non_blocking);
at::Tensor move_autograd(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device, bool non_blocking);
at::Tensor move_view(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device, bool non_blocking);

at::Tensor managed_copy_kernel(const at::Tensor& self, c10::Device device, c10::ScalarType dtype, bool non_blocking,
                               c10::MemoryFormat memory_format);
at::Tensor managed_copy_autograd(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device,
                                 c10::ScalarType dtype, bool non_blocking, c10::MemoryFormat memory_format);

// The operators as the dispatcher has them.

const c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, c10::Device, bool)>& move_operator();
const c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, c10::Device, c10::ScalarType, bool, c10::MemoryFormat)>&
managed_copy_operator();

} // namespace torch_uvm
