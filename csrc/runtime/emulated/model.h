// The configuration of an emulated machine, and the values it reports: counters, residency, samples.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_uvm {

inline constexpr std::size_t kEmulatedPageBytes = 64 * 1024;

struct EmulatedConfig {
  static constexpr int kMaxDevices = 64;
  static constexpr std::size_t kMinMemory = std::size_t{1} << 20;

  int devices = 1; ///< 1 to kMaxDevices
  std::size_t memory = std::size_t{256} << 20; ///< bytes of each device, at least kMinMemory
  std::string profile = "h200";
  /// With a seed, queued work is delayed at random until a thread waits for it.
  std::optional<std::uint64_t> schedule_seed = std::nullopt;

  bool operator==(const EmulatedConfig&) const = default;
};

// clang-format off
// X(name): a count since the runtime was created or since reset_counters
#define TORCH_UVM_EMULATED_COUNTERS(X) \
  X(faults_on_device)       /* pages */ \
  X(faults_on_host)         /* pages */ \
  X(bytes_to_device)        /* by migration, prefetch and duplication */ \
  X(bytes_to_host)          /* by migration, prefetch and eviction */ \
  X(bytes_copied_to_device) /* by copy_async */ \
  X(bytes_copied_to_host) \
  X(bytes_in_place)         /* used across the link without moving */ \
  X(evicted_pages) \
  X(dropped_pages)          /* duplicates, and discarded pages, that were dropped for free */ \
  X(kernels) \
  X(prefetch_calls) \
  X(advise_calls) \
  X(discard_calls) \
  X(zero_calls) \
  X(copy_calls) \
  X(allocate_calls) \
  X(free_calls) \
  X(event_records) \
  X(synchronisations)       /* the host waited for a stream, an event or a device */
// clang-format on

/// Counters of one device, or the total. Only the total includes what belongs to no device.
struct EmulatedCounters {
#define TORCH_UVM_DECLARE(name) std::uint64_t name = 0;
  TORCH_UVM_EMULATED_COUNTERS(TORCH_UVM_DECLARE)
#undef TORCH_UVM_DECLARE
};

/// Resident bytes by location. A duplicated page counts at each of its locations.
struct ResidencyInfo {
  std::size_t host = 0;
  std::vector<std::size_t> devices;
  std::size_t untouched = 0; ///< not resident anywhere
};

/// One point of `timeline`.
struct ResidencySample {
  double time_us = 0; ///< modelled time
  std::size_t device_bytes = 0; ///< managed bytes resident on the device
  std::size_t plain_bytes = 0; ///< plain device memory allocated there
  std::size_t managed_bytes = 0; ///< managed bytes allocated, of all devices
};

/// An access to a range by a kernel or host code.
struct Touch {
  const void* ptr = nullptr;
  std::size_t bytes = 0;
  bool write = false;
};

} // namespace torch_uvm
