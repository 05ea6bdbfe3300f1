// The hints given for a managed range, as a list. Replaying the list yields the range's attributes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/managed_runtime.h"

namespace torch_uvm::recording {

/// One prefetch or advice for the addresses in [begin, end).
struct Hint {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::optional<Advice> advice; ///< nullopt: a prefetch
  Location location;
};

/// The attributes of a range after these hints, in order.
RangeAttributes attributes_of(const std::vector<Hint>& hints, std::uintptr_t begin, std::uintptr_t end);

} // namespace torch_uvm::recording
