// Memory advice about the pages of tensors. Advice is recorded by block (tensor/storage/advice_registry.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "runtime/location.h"

namespace torch_uvm {

/// The changes to make; a nullopt field leaves that advice unchanged.
struct AdviceChange {
  std::optional<bool> read_mostly;
  std::optional<std::optional<Location>> preferred_location; ///< inner nullopt: unset it
  std::optional<std::vector<Location>> accessed_by; ///< replaces the previous set
};

/// Advises the whole pages that belong to the given tensors alone; skips other pages and tensors, as prefetch does.
/// \throws c10::Error for a location that does not exist, and for tensors of a user-chosen allocator; nothing has
///         changed then
void advise(const std::vector<at::Tensor>& tensors, const AdviceChange& change);

} // namespace torch_uvm
