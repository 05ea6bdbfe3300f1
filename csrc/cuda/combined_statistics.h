// Native and managed memory of a device in one set of figures.
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

/// Peaks of two allocators do not add up: they were not at the same time. The peaks of the sums are kept
/// here, looked at whenever managed memory is given out, and native memory while managed blocks are in use.
///
/// Native memory is freed without our knowing, so what is believed to be in use is too much at worst. The
/// truth is read only where a sum may be a new peak. What triggers that on the native side is bytes: the
/// peaks of counts, and of reserved memory, are as exact as the moments of those readings.
class CombinedStatistics {
 public:
  /// Both together. `native` is changed in place.
  void add(c10::DeviceIndex device, DeviceStats& native, const Statistics& managed);

  /// Takes note of a level. `read_native` gives DeviceStats and is called only if it may be a new peak.
  template <typename ReadNative>
  void note(c10::DeviceIndex device, const Levels& managed, ReadNative read_native) {
    const std::lock_guard lock(mutex_);
    Device& known = of(device);
    if (exceeds(known, managed)) {
      known.grown.store(0, std::memory_order_relaxed); // before it is read: what comes meanwhile counts
      take(known, managed, read_native());
    }
    set_room(known, managed);
  }

  /// Native memory was given out. \return whether that may be a new peak, which `note` finds out
  bool native_grew(c10::DeviceIndex device, std::size_t bytes) {
    Device& known = of(device);
    const std::int64_t most = at_most(bytes);
    return known.grown.fetch_add(most, std::memory_order_relaxed) + most > known.room.load(std::memory_order_relaxed);
  }

  void reset_peaks(c10::DeviceIndex device, const DeviceStats& native, const Levels& managed);

  static constexpr std::size_t kLevels = 7; ///< the arrays of DeviceStats that have a peak worth keeping

 private:
  using Figures = std::array<std::array<std::int64_t, kPoolKinds>, kLevels>;
  struct Device {
    bool read = false; ///< `native` was read once
    Figures native{};
    Figures peak{};
    std::atomic<std::int64_t> grown{0}; ///< bytes of native memory given out since it was read
    std::atomic<std::int64_t> room{0}; ///< how far it may grow before a sum is a new peak
  };

  Device& of(c10::DeviceIndex device) {
    return devices_.at(static_cast<std::size_t>(device));
  }
  static std::int64_t at_most(std::size_t bytes); ///< of a native block for a request
  static bool exceeds(const Device& known, const Levels& managed);
  static void take(Device& known, const Levels& managed, const DeviceStats& native);
  static void set_room(Device& known, const Levels& managed);

  std::mutex mutex_; // leaf, but for reading native statistics
  std::array<Device, C10_COMPILE_TIME_MAX_GPUS> devices_{};
};

} // namespace torch_uvm::cuda
