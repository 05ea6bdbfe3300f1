// Where the allocations of an iteration lie, once it is known when each of them comes and goes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "runtime/location.h"

namespace torch_uvm {

/// Of an allocation that is not freed within the iteration.
constexpr std::uint32_t kNoEnd = std::numeric_limits<std::uint32_t>::max();

/// One allocation. Its life is a part of one line of events, allocations and frees of all streams together.
struct PlanRequest {
  std::size_t bytes = 0;
  std::uint32_t begin = 0; ///< the index of the event that allocates it
  std::uint32_t end = kNoEnd; ///< the index of the event that frees it
  Stream stream;
};

/// The bytes of one stream, in one piece.
struct PlanRegion {
  Stream stream;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

struct PlanLayout {
  std::vector<std::size_t> offsets; ///< of each request, in the order given
  std::vector<PlanRegion> regions; ///< one after the other, by the first request of each stream
  std::size_t bytes = 0; ///< of all
  std::size_t peak_live_bytes = 0; ///< the most that is asked for at once, of all streams: no layout has less
};

/// Lays out requests so that those whose lives overlap share no byte. Bytes are used again within one stream only: the
/// work of its next user then comes behind that of the last one by itself, with no event.
///
/// Offsets are multiples of 256, those of requests from 1 MiB on of 512, within their region. Deterministic.
///
/// Finding the best layout is NP-hard. Several orders are tried (by bytes, by bytes times life, by life), each request
/// going into the smallest gap that those placed before leave where its life overlaps theirs; then what reaches the
/// top is placed earlier, some times over. One order of n requests costs at most n * n / 2 comparisons, 16 at a time,
/// and all of them together stay within a fixed number (a second or so). The smallest requests, which make up less
/// than 1% of the peak together, are left out of that: they get a part of the region of their own, in one sweep
/// over the events. Where there are more of the others than the number of comparisons allows, all go by that sweep, in
/// O(n log n), or the largest by size and the rest by the sweep, whichever takes less.
/// \throws InvalidArgument for a request that ends before it begins, or of more bytes than a machine has
PlanLayout lay_out(const std::vector<PlanRequest>& requests);

} // namespace torch_uvm
