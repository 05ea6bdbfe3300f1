// The state of an EmulatedRuntime. Private to the emulated runtime's source files.
#pragma once

#include <map>
#include <mutex>
#include <vector>

#include "runtime/emulated/clock.h"
#include "runtime/emulated/counters.h"
#include "runtime/emulated/emulated_runtime.h"
#include "runtime/emulated/pages.h"
#include "runtime/emulated/queue.h"
#include "runtime/emulated/timeline.h"

namespace torch_uvm {

struct EmulatedRuntime::State {
  using Lock = std::unique_lock<std::mutex>;

  /// Pinned host memory, or plain memory of a device.
  struct PlainAllocation {
    std::uintptr_t base = 0;
    std::size_t bytes = 0;
    int device = -1; ///< -1: pinned
    std::size_t reserved = 0; ///< bytes of the device's capacity
  };

  explicit State(const EmulatedConfig& config);
  ~State();

  /// Calls the hook. With the mutex held.
  /// \throws what the hook throws
  void call(std::string_view name, std::size_t bytes = 0) {
    if (call_hook) {
      call_hook(name, bytes);
    }
  }
  void check_device(int device) const;
  void check_location(Location location) const;
  const PlainAllocation* find_plain(const void* ptr) const;
  /// Whether the address has pinned memory.
  bool is_pinned(const void* ptr) const;
  void kernel_touch(int device, const Touch& touch, emulated::Traffic& traffic);
  void* add_plain(std::size_t bytes, int device, std::size_t reserved);
  /// With one memory: what is not allocated of it, by anybody.
  std::size_t left_of_one_memory() const;
  /// \throws OutOfMemory if that is less than `bytes`
  void check_one_memory(std::size_t bytes) const;
  void free_plain(void* ptr, bool pinned);
  /// A copy's range must not extend beyond the end of the allocation in which it begins.
  void check_copy_range(const char* side, const void* ptr, std::size_t bytes) const;

  /// The queue's callback: updates pages, clocks and counters for one operation.
  void account(emulated::StreamState& stream, const emulated::Operation& operation);
  void account_copy(emulated::StreamState& stream, const emulated::Operation& operation);

  /// The `sample` functions add a point to timelines: of one device; of the user and the locations that lost pages to
  /// it; of all devices.
  void sample(int device, double time_us);
  void sample(Location user, const emulated::Traffic& traffic, double time_us);
  void sample_all();

  const EmulatedConfig config;
  const CostProfile& profile;
  mutable std::mutex mutex;
  emulated::CounterTable counters;
  emulated::PageTable pages;
  emulated::EmulatedClock clock;
  std::vector<emulated::Timeline> timelines;
  std::map<std::uintptr_t, PlainAllocation> plain;
  CallHook call_hook;
  emulated::EmulatedQueue queue; ///< last: its workers end before the other members are destroyed
};

} // namespace torch_uvm
