// What an emulated machine is: how its memories are connected, and the costs of memory traffic.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace torch_uvm {

/// The memories of host and devices.
enum class MemoryKind {
  kSeparate, ///< each has its own, and pages migrate to who touches them
  kCoherent, ///< each has its own; pages stay where they were touched first, and the others use them across the link
  kOne, ///< the devices use the host's
};

/// Rates in bytes per second, times in microseconds.
struct CostProfile {
  std::string name;
  MemoryKind memory;
  double device_memory_rate; ///< kernels accessing resident pages
  double host_memory_rate; ///< host code accessing host-resident pages
  double copy_to_device_rate, copy_to_host_rate; ///< asynchronous copies from and to pinned host memory
  double copy_both_ways_rate; ///< of such copies in both directions at once, together
  double pageable_copy_rate; ///< asynchronous copies of host-resident managed or ordinary memory
  double device_copy_rate; ///< within a device
  double peer_copy_rate; ///< between devices
  double fault_to_device_rate, fault_to_host_rate; ///< fault migration
  double fault_populate_rate; ///< first touch of fresh memory by a kernel
  double prefetch_to_device_rate, prefetch_to_host_rate;
  double prefetch_populate_rate; ///< prefetch of fresh memory
  double in_place_rate; ///< a device accessing mapped host memory over the link
  double in_place_fault_rate; ///< the same without a mapping (no accessed-by), by faults
  double discard_rate;
  double prefetch_us; ///< fixed cost of a prefetch that moves or populates pages; it makes small prefetches slow
  double launch_us; ///< fixed cost of a kernel launch
  double call_us; ///< fixed cost of any other runtime call

  /// The profile of that name. \throws InvalidArgument for a name that `names()` does not list
  static const CostProfile& named(std::string_view name);
  static std::vector<std::string> names();
};

} // namespace torch_uvm
