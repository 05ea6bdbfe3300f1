// Hints about where the bytes of tensors should be. None of them changes a result.
//
// Every hint reaches whole pages that belong to the given tensors alone (tensor/hints/owned_bytes.h). Tensors that
// are not managed are passed over. Where host and device may not touch managed memory at the same time
// the runtime accepts no hints: they do nothing there, and say so once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/location.h"

namespace torch_uvm {

/// Starts moving the tensors' bytes to `device`, or each to the device of its label, on `stream`.
/// \param stream nullopt: the current one of the target device; to the host that of the device that has them
/// \throws c10::Error for a device that does not exist; nothing has been moved then
void prefetch(const std::vector<at::Tensor>& tensors, std::optional<c10::Device> device, std::optional<Stream> stream);

/// The same for one tensor and no other book-keeping: what a move does, which files the block itself.
void prefetch_range_of(const at::Tensor& tensor, Location to, Stream stream);

/// Says that the tensors' contents are not needed any more, in the order of the current stream; under the
/// CPU's label that has happened when this returns. Their versions count up, as after a write.
void discard(const std::vector<at::Tensor>& tensors);

/// Bytes of the tensors by where the library last put them: whatever faults moved since is not told.
/// What is not managed is where its label says. Each byte once, however many of the tensors reach it.
/// \return places that have some, in the order they were met
std::vector<std::pair<c10::Device, std::size_t>> residency(const std::vector<at::Tensor>& tensors);

/// Whether a tensor has bytes of its own that can be asked about: strided, and neither meta nor fake.
bool has_bytes(const at::Tensor& tensor);

/// Registers the operators torch_uvm::prefetch, advise and discard; calling it again does nothing.
void register_hints();

} // namespace torch_uvm
