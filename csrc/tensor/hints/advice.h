// Advice about the pages of tensors. What is set is remembered by block (tensor/storage/advice_book.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "runtime/location.h"

namespace torch_uvm {

/// What to change; what is nullopt stays as it is.
struct AdviceChange {
  std::optional<bool> read_mostly;
  std::optional<std::optional<Location>> preferred_location; ///< nullopt within: none any more
  std::optional<std::vector<Location>> accessed_by; ///< in place of the set there was
};

/// Gives advice about the pages that are all the tensors' own; others are passed over, as by prefetch.
/// \throws c10::Error for a location that does not exist; nothing has changed then
void advise(const std::vector<at::Tensor>& tensors, const AdviceChange& change);

} // namespace torch_uvm
