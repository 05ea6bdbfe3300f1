// Moves: another label for the same bytes, as an operator that autograd knows.
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
/// the caller's duty. Between devices: ordered after the source device's current stream.
/// \param self managed and strided
/// \param device the CPU, or a device of the accelerator with its index
/// \throws c10::Error, and nothing has changed
at::Tensor move(const at::Tensor& self, c10::Device device, bool non_blocking);

/// Registers the operator torch_uvm::move, for the CPU and the emulated accelerator; calling it again does
/// nothing.
void register_moves();

} // namespace torch_uvm
