// Combined statistics of a device's native and managed memory.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDAMacros.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>

#include "allocator/statistics.h"

namespace torch_uvm::cuda {

using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;

/// The peaks of two allocators cannot be added, as they occur at different times. This class tracks the peaks of the
/// sums. It checks them on every managed allocation, and on every native one while managed blocks are in use.
///
/// Native frees are not observed, so the estimate of native bytes in use can only be too high. The exact native
/// statistics are read only if a sum may be a new peak. On the native side only allocated bytes trigger such a read:
/// the peaks of counts and of reserved memory are exact only at those reads.
class CombinedStatistics {
 public:
  /// Adds the managed statistics to `native`, in place.
  void add(c10::DeviceIndex device, DeviceStats& native, const Statistics& managed);

  /// Updates the peaks with the current managed levels. `read_native` returns DeviceStats; it is called only if a sum
  /// may be a new peak.
  template <typename ReadNative>
  void note(c10::DeviceIndex device, const Levels& managed, ReadNative read_native) {
    const std::lock_guard lock(mutex_);
    Device& known = of(device);
    if (exceeds(known, managed)) {
      known.grown.store(0, std::memory_order_relaxed); // before the read: allocations during it count as growth
      take(known, managed, read_native());
    }
    set_room(known, managed);
  }

  /// Call after a native allocation. \return whether it may be a new peak; then call `note`
  bool native_grew(c10::DeviceIndex device, std::size_t bytes) {
    Device& known = of(device);
    const std::int64_t most = at_most(bytes);
    return known.grown.fetch_add(most, std::memory_order_relaxed) + most > known.room.load(std::memory_order_relaxed);
  }

  void reset_peaks(c10::DeviceIndex device, const DeviceStats& native, const Levels& managed);

  static constexpr std::size_t kLevels = 7; ///< arrays of DeviceStats whose peaks are tracked

 private:
  using Figures = std::array<std::array<std::int64_t, kPoolKinds>, kLevels>;
  struct Device {
    bool read = false; ///< `native` was read at least once
    Figures native{};
    Figures peak{};
    std::atomic<std::int64_t> grown{0}; ///< native bytes allocated since `native` was read
    std::atomic<std::int64_t> room{0}; ///< how far `grown` may rise before a sum may be a new peak
  };

  Device& of(c10::DeviceIndex device) {
    return devices_.at(static_cast<std::size_t>(device));
  }
  static std::int64_t at_most(std::size_t bytes); ///< upper bound of the native block's size for a request
  static bool exceeds(const Device& known, const Levels& managed);
  static void take(Device& known, const Levels& managed, const DeviceStats& native);
  static void set_room(Device& known, const Levels& managed);

  std::mutex mutex_; // leaf, except that native statistics are read with it held
  std::array<Device, C10_COMPILE_TIME_MAX_GPUS> devices_{};
};

} // namespace torch_uvm::cuda
