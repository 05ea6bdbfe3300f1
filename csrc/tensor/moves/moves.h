// Moves: another label for the same bytes, as an operator that autograd knows (tensor/moves/operators.h).
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace torch_uvm {

/// A view of `self` labelled with `device`: same address, sizes, strides and offset, one version counter.
/// Its backward moves the gradient back. Writing in place to the view of a tensor that requires grad
/// raises.
///
/// To a device: the range starts moving there on the current stream; nothing is waited for. To the CPU:
/// the device's pending work that may touch the bytes is waited for, unless `non_blocking`: then that is
/// the caller's duty. Between devices: ordered after the source device's current stream. Work that may
/// touch the bytes is what is queued on the current stream of the device they are labelled with, on the
/// stream that used them last, and on those that record_stream named.
/// \param self managed and strided
/// \param device the CPU, or a device of the accelerator; without an index, the current one
/// \throws c10::Error, and nothing has changed
at::Tensor move(const at::Tensor& self, c10::Device device, bool non_blocking);

/// The same, for the tensors of modules, which keep the label and forget the source: no view, so that
/// nothing holds the source, and it can be swapped with the result. A view all the same where autograd has to
/// know: while grad mode is on, of what requires grad; and of what has a tangent.
at::Tensor move_for_module(const at::Tensor& self, c10::Device device, bool non_blocking);

/// `device` with its index, checked.
/// \param what the operator, as errors name it
/// \throws c10::ValueError for what is neither the CPU nor a device of the accelerator
c10::Device resolve_device(c10::Device device, const char* what);

} // namespace torch_uvm
