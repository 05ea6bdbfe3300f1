// The operators torch_uvm::move and torch_uvm::managed_copy.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

namespace torch_uvm {

/// A new managed tensor labelled `device`, whether or not the switch is on.
/// \throws c10::Error if `device` has no managed memory, or a graph capture or memory pool is active;
///         c10::OutOfMemoryError
at::Tensor empty_strided_managed(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype,
                                 c10::Device device);

/// Registers torch_uvm::move, and torch_uvm::managed_copy, which copies to new managed memory, with their derivatives,
/// once per process. Fake kernels and
/// batching rules are in torch_uvm/_tensors/operators.py.
void register_operators();

// The kernels (moves.cpp, moves_autograd.cpp, move_views.cpp). Those that take a key set are for autograd keys, and
// redispatch to the next key.

at::Tensor move_kernel(const at::Tensor& self, c10::Device device, bool non_blocking);
at::Tensor move_autograd(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device, bool non_blocking);
at::Tensor move_view(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device, bool non_blocking);

at::Tensor managed_copy_kernel(const at::Tensor& self, c10::Device device, c10::ScalarType dtype, bool non_blocking,
                               c10::MemoryFormat memory_format);
at::Tensor managed_copy_autograd(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device,
                                 c10::ScalarType dtype, bool non_blocking, c10::MemoryFormat memory_format);

// Dispatcher handles of the operators.

const c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, c10::Device, bool)>& move_operator();
const c10::TypedOperatorHandle<at::Tensor(const at::Tensor&, c10::Device, c10::ScalarType, bool, c10::MemoryFormat)>&
managed_copy_operator();

} // namespace torch_uvm
