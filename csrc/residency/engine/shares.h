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

// Staging slots. On an H200, two slots per direction of 8 to 32 MiB hide 90 to 97 % of the copies behind short kernels;
// slots of 4 MiB hide 40 to 80 % (benchmarks/copy_overlap.py). Within 1.45 GiB on an H100, 16k tokens with deferred
// updates take 278 ms with slots of 5.8 MiB, 244 with 12 and 243 with 16. A slot is filled or left between two kernels,
// and large budgets have long ones: within 16 GiB a LoRA of 14 B takes 2.29 s with slots of 16 MiB, 2.21 with 64 and
// 2.11 with 192.
inline constexpr std::size_t kSlotShare = 128; ///< each slot gets at most 1/128 of the budget
inline constexpr std::size_t kLargeSlotShare = 512; ///< and, beside 16 MiB, 1/512 of it
inline constexpr std::size_t kSlotGranularity = 64 * KiB;
inline constexpr std::size_t kSmallestSlot = 1 * MiB; ///< below this there is no staging
inline constexpr std::size_t kStagingSlots = 2 * Staging::kSlots; ///< of both directions

/// Bytes of a slot on a device that needs staging; 0: no staging.
inline std::size_t default_slot_bytes(std::size_t budget) {
  const std::size_t most = 16 * MiB + budget / kLargeSlotShare;
  const std::size_t slot = round_down(std::min(budget / kSlotShare, most), kSlotGranularity);
  return slot < kSmallestSlot ? 0 : slot;
}

} // namespace torch_uvm
