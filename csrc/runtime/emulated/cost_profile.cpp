// The table of cost profiles.
#include "runtime/emulated/cost_profile.h"

#include <sstream>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

constexpr double GB = 1e9; // rates are in decimal units

const std::vector<CostProfile>& profiles() {
  // Leaked: the runtime uses its profile until the process exits.
  static const auto& all = *new std::vector<CostProfile>{
      // One H200 on PCIe Gen5 x16, CUDA 13.0, driver 580. Measured, unless a line says "assumed".
      {
          .name = "h200",
          .memory = MemoryKind::kSeparate,
          .device_memory_rate = 3800 * GB,
          .host_memory_rate = 100 * GB, // assumed: a few cores reading local memory
          .copy_to_device_rate = 55.3 * GB,
          .copy_to_host_rate = 55.3 * GB,
          .copy_both_ways_rate = 100.7 * GB,
          .pageable_copy_rate = 9.5 * GB, // the middle of the range 5 to 14
          .device_copy_rate = 2080 * GB,
          .peer_copy_rate = 51.3 * GB, // assumed: over PCIe, without NVLink
          .fault_to_device_rate = 7.4 * GB,
          .fault_to_host_rate = 5.8 * GB,
          .fault_populate_rate = 10.6 * GB,
          .prefetch_to_device_rate = 49.8 * GB,
          .prefetch_to_host_rate = 10.1 * GB,
          .prefetch_populate_rate = 280 * GB,
          .in_place_rate = 51.2 * GB,
          .in_place_fault_rate = 1 * GB,
          .discard_rate = 300 * GB,
          // Fits the measured GB/s: 2 MiB 17, 8 MiB 33, 32 MiB 44, 128 MiB 48.
          .prefetch_us = 85,
          .launch_us = 4, // assumed
          .call_us = 4.5, // measured: a prefetch of pages that are already resident
      },

      // One GB10 (DGX Spark), not measured by us. The rate of the LPDDR5X that CPU and GPU share is NVIDIA's; a copy
      // reads and writes it. docs/emulator.md names the source of each figure.
      {
          .name = "gb10",
          .memory = MemoryKind::kOne,
          .device_memory_rate = 273 * GB,
          .host_memory_rate = 100 * GB,
          .copy_to_device_rate = 136.5 * GB,
          .copy_to_host_rate = 136.5 * GB,
          .copy_both_ways_rate = 136.5 * GB,
          .pageable_copy_rate = 136.5 * GB,
          .device_copy_rate = 136.5 * GB,
          .peer_copy_rate = 136.5 * GB,
          .fault_to_device_rate = 273 * GB,
          .fault_to_host_rate = 273 * GB,
          .fault_populate_rate = 10 * GB,
          .prefetch_to_device_rate = 273 * GB,
          .prefetch_to_host_rate = 273 * GB,
          .prefetch_populate_rate = 273 * GB,
          .in_place_rate = 273 * GB,
          .in_place_fault_rate = 273 * GB,
          .discard_rate = 300 * GB,
          .prefetch_us = 85,
          .launch_us = 4,
          .call_us = 4.5,
      },

      // One GH200 with HBM3, not measured by us. The rates of both memories and of both directions of the link were
      // published by Schieffer et al. docs/emulator.md names the source of each figure.
      {
          .name = "gh200",
          .memory = MemoryKind::kCoherent,
          .device_memory_rate = 3400 * GB,
          .host_memory_rate = 486 * GB,
          .copy_to_device_rate = 375 * GB,
          .copy_to_host_rate = 297 * GB,
          .copy_both_ways_rate = 486 * GB,
          .pageable_copy_rate = 297 * GB,
          .device_copy_rate = 1700 * GB,
          .peer_copy_rate = 297 * GB,
          .fault_to_device_rate = 375 * GB,
          .fault_to_host_rate = 297 * GB,
          .fault_populate_rate = 10 * GB,
          .prefetch_to_device_rate = 375 * GB,
          .prefetch_to_host_rate = 297 * GB,
          .prefetch_populate_rate = 280 * GB,
          .in_place_rate = 375 * GB,
          .in_place_fault_rate = 375 * GB,
          .discard_rate = 300 * GB,
          .prefetch_us = 85,
          .launch_us = 4,
          .call_us = 4.5,
      },
  };
  return all;
}

} // namespace

const CostProfile& CostProfile::named(std::string_view name) {
  for (const CostProfile& profile : profiles()) {
    if (profile.name == name) {
      return profile;
    }
  }
  std::ostringstream message;
  message << "cost profile '" << name << "' is not known; accepted are";
  for (const CostProfile& profile : profiles()) {
    message << " '" << profile.name << "'";
  }
  throw InvalidArgument(message.str());
}

std::vector<std::string> CostProfile::names() {
  std::vector<std::string> names;
  for (const CostProfile& profile : profiles()) {
    names.push_back(profile.name);
  }
  return names;
}

} // namespace torch_uvm
