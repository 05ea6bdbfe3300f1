// Moves: a view of the same bytes with another device label, as a differentiable operator (operators.cpp).
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Device.h>
#include <c10/core/MemoryFormat.h>

namespace torch_uvm {

/// A view of `self` labelled with `device`: same address, sizes, strides, offset and version counter. Its backward
/// moves the gradient back. An in-place write to the view of a tensor that requires grad raises.
///
/// - To a device: starts a prefetch on the target's current stream, after the pending work on the bytes. The host does
///   not wait.
/// - To the CPU: the host waits for the pending work on the bytes. With `non_blocking` the caller has to.
///
/// The pending work on the bytes is the work queued on the current stream of the label's device, on the stream that
/// used them last, and on the streams named by record_stream.
/// \param self managed and strided
/// \param device the CPU, or an accelerator device; without an index, the current one
/// \throws c10::Error; nothing has changed then
at::Tensor move(const at::Tensor& self, c10::Device device, bool non_blocking);

/// The same for parameters and buffers of modules. The result is not a view, so it does not keep the source alive and
/// the two can be swapped. It is a view only if autograd needs one: `self` requires grad while grad mode is on, or has
/// a tangent.
at::Tensor move_for_module(const at::Tensor& self, c10::Device device, bool non_blocking);

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

using MoveOperator = c10::TypedOperatorHandle<decltype(move_kernel)>;
const MoveOperator& move_operator();
using ManagedCopyOperator = c10::TypedOperatorHandle<decltype(managed_copy_kernel)>;
const ManagedCopyOperator& managed_copy_operator();

// --- adoption (adopt.cpp): a tensor in a file's mapping becomes managed without a copy

/// Whether `adopt` is worth a try: the tensor may lie in a file's mapping. Needs no runtime.
bool may_adopt(const at::Tensor& tensor);

/// Makes the storage of `tensor` managed where it is. All tensors on the storage are managed then; addresses, contents
/// and labels stay.
///
/// It does so where every device has one memory with the host and addresses pageable memory, and for a strided CPU
/// tensor that is aligned to its elements and whose storage lies in writable private mappings of files
/// (torch.load(mmap=True), safetensors). A write copies the page and does not reach the file.
/// \return whether the tensor is managed now
/// \throws what the runtime throws as it is made
bool adopt(const at::Tensor& tensor);

} // namespace torch_uvm
