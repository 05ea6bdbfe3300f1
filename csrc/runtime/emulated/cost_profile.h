// What moving memory costs on an emulated machine.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace torch_uvm {

/// Costs of moving memory; rates in bytes a second, times in microseconds.
struct CostProfile {
  std::string name;
  double device_memory_rate; ///< kernels on resident pages
  double host_memory_rate; ///< host code on host-resident pages
  double copy_to_device_rate, copy_to_host_rate; ///< asynchronous copies, pinned host memory
  double pageable_copy_rate; ///< asynchronous copies of host-resident managed or ordinary memory
  double device_copy_rate; ///< within a device
  double peer_copy_rate; ///< between devices
  double fault_to_device_rate, fault_to_host_rate; ///< migration on a fault
  double fault_populate_rate; ///< first touch of fresh memory by a kernel
  double prefetch_to_device_rate, prefetch_to_host_rate;
  double prefetch_populate_rate; ///< prefetch of fresh memory
  double in_place_rate; ///< a device using mapped host memory across the link
  double in_place_fault_rate; ///< the same without a mapping (no accessed-by)
  double discard_rate;
  double prefetch_us; ///< fixed cost of a prefetch that moves something: small pieces are what is slow
  double launch_us; ///< a kernel's fixed cost
  double call_us; ///< any other runtime call's fixed cost

  /// The profile of that name; `names()` lists them. \throws InvalidArgument
  static const CostProfile& named(std::string_view name);
  static std::vector<std::string> names();
};

} // namespace torch_uvm
