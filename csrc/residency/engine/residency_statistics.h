// Counters of what the engine did.
#pragma once

#include <cstdint>
#include <map>

namespace torch_uvm {

struct ResidencyStatistics {
  struct Traffic {
    std::int64_t count = 0;
    std::int64_t bytes = 0;
    double ms = 0.0; ///< of copies: measured by device events; of `waited` and `made_room`: host time
  };

  Traffic fetched; ///< host to device
  Traffic written_back; ///< device to host
  Traffic dropped_clean; ///< clean device copies that were evicted without a copy; takes no time
  Traffic moved; ///< relocated within the device to make room for a large request
  Traffic used_in_place; ///< operands that an operator used on the host; part of the operator's own time
  Traffic waited; ///< the host blocked until a copy was done
  Traffic made_room; ///< allocations that called the engine for room
  std::int64_t plan_hits = 0; ///< operators that matched the schedule
  std::int64_t plan_misses = 0;
  std::int64_t over_budget = 0; ///< operators with operands used on the host for want of room, and allocations beyond
                                ///< the budget, and budgets that are exceeded when they are set
  std::map<int, std::int64_t> device_bytes; ///< managed memory reserved now, with staging slots, by device
  std::map<int, std::int64_t> peak_device_bytes;
  std::int64_t host_bytes = 0; ///< pinned memory reserved for host copies
  std::int64_t records = 0; ///< storages that the engine tracks
  std::int64_t failures = 0; ///< runtime calls or host allocations that failed in the engine and were worked around
};

} // namespace torch_uvm
