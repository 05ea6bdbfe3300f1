// The parts of a budget that hold no storages.
#pragma once

#include <algorithm>
#include <cstddef>

#include "residency/engine/staging.h"
#include "runtime/bytes.h"

namespace torch_uvm {

/// Where the driver commits memory in large steps, it may exceed a budget by 1/32. As much in small storages may lie
/// beside an operator that needs all of a budget.
inline constexpr std::size_t kBeyondShare = 32;

/// Schedules leave 1/64 of the cap free for fragmentation.
inline constexpr std::size_t kReserveShare = 64;

// Staging slots. On an H200, two slots per direction of 8 to 32 MiB hide 90 to 97 % of the copies behind kernels; slots
// of 4 MiB hide 40 to 80 % (benchmarks/copy_overlap.py). Within 1.45 GiB on an H100, 16k tokens with deferred updates
// take 278 ms with slots of 5.8 MiB, 244 with 12 and 243 with 16.
inline constexpr std::size_t kSlotShare = 128; ///< each slot gets 1/128 of the budget
inline constexpr std::size_t kLargestSlot = 16 * MiB;
inline constexpr std::size_t kSlotGranularity = 64 * KiB;
inline constexpr std::size_t kSmallestSlot = 1 * MiB; ///< below this there is no staging
inline constexpr std::size_t kStagingSlots = 2 * Staging::kSlots; ///< of both directions

/// Bytes of a slot on a device that needs staging; 0: no staging.
inline std::size_t default_slot_bytes(std::size_t budget) {
  const std::size_t slot = round_down(std::min(budget / kSlotShare, kLargestSlot), kSlotGranularity);
  return slot < kSmallestSlot ? 0 : slot;
}

} // namespace torch_uvm
