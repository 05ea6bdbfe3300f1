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

/// An allocation. Its lifetime is an interval of the sequence of all allocations and frees, over all streams.
struct PlanRequest {
  std::size_t bytes = 0;
  std::uint32_t begin = 0; ///< index of the event that allocates it
  std::uint32_t end = kNoEnd; ///< index of the event that frees it
  Stream stream;
};

/// The contiguous memory of one stream.
struct PlanRegion {
  Stream stream;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

struct PlanLayout {
  std::vector<std::size_t> offsets; ///< one per request, in the order given
  std::vector<PlanRegion> regions; ///< contiguous, in the order of each stream's first request
  std::size_t bytes = 0; ///< total
  std::size_t peak_live_bytes = 0; ///< peak of the requested bytes over all streams; a lower bound for any layout
};

/// Lays out requests so that requests with overlapping lifetimes share no byte. Memory is reused within one stream
/// only: the next user's work then follows the previous user's in stream order, with no event.
///
/// Offsets within a region are multiples of 256; those of requests from 1 MiB on are multiples of 512. The result is
/// deterministic.
///
/// Optimal layout is NP-hard. The heuristic:
/// - Several orders are tried: by bytes, by bytes times lifetime, by lifetime. Each request goes into the smallest
///   sufficient gap between the overlapping requests placed before it. Then the requests that reach the top are moved
///   earlier in the order, a number of times.
/// - One order of n requests takes at most n * n / 2 comparisons, vectorised. The total number of comparisons is
///   bounded (about a second).
/// - The smallest requests, which together make up at most 0.5% of the peak, are excluded. They are placed above the
///   others by one sweep over the events.
/// - If there are too many other requests for the bound, either all are placed by the sweep in O(n log n), or the
///   largest by size and the rest by the sweep, whichever takes less memory.
/// \throws InvalidArgument for a request that ends before it begins, or that is larger than any machine's memory
PlanLayout lay_out(const std::vector<PlanRequest>& requests);

} // namespace torch_uvm
