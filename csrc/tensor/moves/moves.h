// Moves: a view of the same bytes with another device label, as a differentiable operator (tensor/moves/operators.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

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
