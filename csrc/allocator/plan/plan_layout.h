// Offline placement of the allocations of an iteration, given their lifetimes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "runtime/location.h"

namespace torch_uvm {

/// End of an allocation that is not freed within the iteration.
constexpr std::uint32_t kNoEnd = std::numeric_limits<std::uint32_t>::max();

/// An allocation. Its lifetime is an interval of the sequence of all allocations and frees.
struct PlanRequest {
  std::size_t bytes = 0;
  std::uint32_t begin = 0; ///< index of the event that allocates it
  std::uint32_t end = kNoEnd; ///< index of the event that frees it
  Stream stream;
};

struct PlanLayout {
  std::vector<std::size_t> offsets; ///< one per request, in the order given
  std::size_t bytes = 0;
};

/// Lays out requests of one stream so that requests with overlapping lifetimes share no byte. The next user's work then
/// follows the previous user's in stream order, with no event. Offsets are multiples of 512.
///
/// Optimal layout is NP-hard. The heuristic tries three orders: by bytes, by bytes times lifetime, by lifetime. Each
/// request goes into the smallest sufficient gap between the overlapping requests placed before it. An order of n
/// requests takes n * n / 2 comparisons, about a second for three orders of 16384.
/// \param requests each ends after it begins
PlanLayout lay_out(const std::vector<PlanRequest>& requests);

} // namespace torch_uvm
