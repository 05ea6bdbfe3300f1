// What a managed range was told, kept as a list: attributes are found by replaying it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/managed_runtime.h"

namespace torch_uvm::recording {

/// One prefetch or advice for the addresses from `begin` to below `end`.
struct Hint {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::optional<Advice> advice; ///< none: a prefetch
  Location location;
};

/// The attributes of a range after these hints, in their order.
RangeAttributes attributes_of(const std::vector<Hint>& hints, std::uintptr_t begin, std::uintptr_t end);

} // namespace torch_uvm::recording
