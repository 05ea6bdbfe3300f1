// What the engine did, in figures.
#pragma once

#include <cstdint>
#include <map>

namespace torch_uvm {

struct ResidencyStatistics {
  struct Traffic {
    std::int64_t count = 0;
    std::int64_t bytes = 0;
    double ms = 0.0; ///< of the copies, as the device's events have it; of `waited`: the host's time
  };

  Traffic fetched; ///< host to device
  Traffic written_back; ///< device to host
  Traffic dropped_clean; ///< device copies given up with nothing to copy; takes no time
  Traffic moved; ///< to another place of the device, out of the way of a large request
  Traffic used_in_place; ///< operands that an operator used on the host; part of the operator's own time
  Traffic waited; ///< the host waited for a copy
  Traffic made_room; ///< an allocation asked for room; the host's time to find it
  std::int64_t plan_hits = 0; ///< operators that came as planned
  std::int64_t plan_misses = 0;
  std::int64_t over_budget = 0; ///< operators whose operands alone exceeded the budget and were used on the host
  std::map<int, std::int64_t> device_bytes; ///< managed memory reserved on a device now, by device
  std::map<int, std::int64_t> peak_device_bytes;
  std::int64_t host_bytes = 0; ///< pinned memory reserved for host copies
  std::int64_t records = 0; ///< storages that are watched
  std::int64_t failures = 0; ///< calls of the runtime that failed in the engine, and were done without
};

} // namespace torch_uvm
