// Hints about where the bytes of tensors should be. Hints never change results.
//
// A hint applies to the whole pages that belong to the given tensors alone (tensor/hints/owned_bytes.h). Tensors that
// are not managed are skipped. On a device without concurrentManagedAccess the runtime accepts no hints: they do
// nothing there, and warn once.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/location.h"

namespace torch_uvm {

/// Starts migrating the tensors' bytes to `device`, or (nullopt) each tensor to the device of its label.
/// \param stream nullopt: the current stream of the target device; for the host, of the device that has the bytes
/// \throws c10::Error for a device that does not exist; nothing has been moved then
void prefetch(const std::vector<at::Tensor>& tensors, std::optional<c10::Device> device, std::optional<Stream> stream);

/// The same for one tensor, without setting its block's home. For moves, which set it themselves.
void prefetch_range_of(const at::Tensor& tensor, Location to, Stream stream);

/// The changes to make; a nullopt field leaves that advice unchanged.
struct AdviceChange {
  std::optional<bool> read_mostly;
  std::optional<std::optional<Location>> preferred_location; ///< inner nullopt: unset it
  std::optional<std::vector<Location>> accessed_by; ///< replaces the previous set
};

/// Advises the whole pages that belong to the given tensors alone; skips other pages and tensors, as prefetch does.
/// \param change its locations exist
/// \throws c10::Error for tensors of a user-chosen allocator; nothing has changed then
void advise(const std::vector<at::Tensor>& tensors, const AdviceChange& change);

/// Declares the tensors' contents dead, in the order of the current stream. For tensors with a CPU label the discard is
/// complete when this returns. Versions are bumped, as after a write.
void discard(const std::vector<at::Tensor>& tensors);

/// The tensors' bytes by location, as the library last placed them: migrations by page faults are not seen. Memory that
/// is not managed counts for its label. Bytes that several tensors share count once.
/// \return the locations that have bytes, in the order of first occurrence
std::vector<std::pair<c10::Device, std::size_t>> residency(const std::vector<at::Tensor>& tensors);

/// Whether `residency` can answer for a tensor: strided, not nested, and neither meta nor fake.
bool has_bytes(const at::Tensor& tensor);

/// Registers the operators torch_uvm::prefetch, advise and discard, once per process.
void register_hints();

} // namespace torch_uvm
