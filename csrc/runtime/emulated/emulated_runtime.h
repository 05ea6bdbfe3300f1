// A runtime with no hardware: host memory, a driver's book-keeping and a model of time.
//
// - Managed memory is host memory divided into 64 KiB pages. Each page has its residence, its preferred location and
//   its mappings. Touches (see `touch`) fault, migrate, duplicate and evict as the CUDA driver does, least recently
//   used first.
// - Copies, prefetches and discards are queued, one queue for each stream. By default a worker thread of each device
//   copies bytes in the order queued, without delay. Pages and clocks are updated when the call is made, so the same
//   program always produces the same figures. A seeded schedule delays all queued work, until a wait or for a random
//   time, which exposes a missing synchronisation. The calling threads then do the work, and a single-threaded program
//   repeats exactly with the same seed. Kernels run on the caller's thread, after the queued work of their stream (see
//   `begin_kernel`).
// - Each stream and the host have a virtual clock, advanced by the costs of a profile. The figures are modelled; they
//   cover memory traffic only, not arithmetic.
// - Touches by host code are invisible unless the caller reports them.
// - A profile may describe a machine with one memory (see DeviceProperties::one_memory): prefetches and discards do
//   nothing. Integrated devices share `memory` bytes with the host: all that is allocated counts, touched or not.
//
// One mutex guards queues, pages and clocks. It is a leaf of the lock order. Bytes are copied without it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "runtime/emulated/clock.h"
#include "runtime/emulated/model.h"
#include "runtime/emulated/pages.h"
#include "runtime/emulated/queue.h"
#include "runtime/emulated/timeline.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

class EmulatedRuntime final : public ManagedRuntime {
 public:
  static constexpr std::size_t kPageBytes = kEmulatedPageBytes;

  /// \throws InvalidArgument for an unsupported device count, memory size or profile
  explicit EmulatedRuntime(const EmulatedConfig& config = {});
  ~EmulatedRuntime() override;

  void prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) override;
  void advise(void* ptr, std::size_t bytes, Advice advice, Location location) override;
  void discard(void* ptr, std::size_t bytes, Stream stream) override;
  RangeAttributes range_attributes(const void* ptr, std::size_t bytes) const override;
  void* allocate_pinned(std::size_t bytes) override;
  void free_pinned(void* ptr) noexcept override;
  void* allocate_device(std::size_t bytes, int device) override;
  void free_device(void* ptr) noexcept override;
  void copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) override;
  void zero_async(void* ptr, std::size_t bytes, Stream stream) override;
  void delay(double us, Stream stream) override;
  Stream create_stream(int device, int priority) override;
  void destroy_stream(Stream stream) noexcept override;
  bool query_stream(Stream stream) override;
  void synchronize_stream(Stream stream) override;
  void synchronize_device(int device) override;
  Event create_event(int device, bool timing) override;
  void destroy_event(Event event) noexcept override;
  void record_event(Event event, Stream stream) override;
  bool query_event(Event event) override;
  void synchronize_event(Event event) override;
  void wait_event(Stream stream, Event event) override;
  double elapsed_ms(Event from, Event to) override;
  double host_ms() const override; ///< by the modelled clock
  int device_count() const override;
  DeviceProperties device_properties(int device) const override;
  MemoryInfo memory_info(int device) const override;
  std::size_t host_memory_available() const override;

  // --- functions that only the emulator has ---------------------------------------------------------------

  /// Begins a kernel that runs on the caller's thread as if on `stream`. Waits for the queued work of the stream (not
  /// counted as a synchronisation), touches the ranges as that device, and advances the stream's clock by the modelled
  /// cost. Ranges outside managed memory cost device time only.
  void begin_kernel(Stream stream, std::span<const Touch> accesses);

  /// Waits for earlier queued work that may still access memory which the running kernel has allocated, as the launch
  /// of a later kernel would.
  void wait_in_kernel(Stream stream);

  /// Ends the kernel: touches the ranges that the kernel created, which were unknown at its beginning.
  void end_kernel(Stream stream, std::span<const Touch> accesses);

  /// Reports a use of these ranges by host code: faults as the host and advances the host's clock. Does not wait.
  void touch_from_host(std::span<const Touch> accesses);

  ResidencyInfo residency(const void* ptr, std::size_t bytes) const;

  /// Whether the address lies in this runtime's pinned memory.
  bool is_pinned_ptr(const void* ptr) const;

  EmulatedCounters counters(std::optional<int> device = std::nullopt) const; ///< \throws InvalidArgument
  /// Sets counters to 0 and peaks to the current levels, and clears timelines. The clocks continue.
  void reset_counters();

  std::size_t resident_bytes(int device) const; ///< managed bytes that are resident on the device now
  std::size_t peak_resident_bytes(int device) const; ///< since the last reset_counters
  double stream_time_us(Stream stream) const; ///< modelled time
  /// The latest time of all clocks.
  double time_us() const;

  /// Residency of a device over modelled time. It has at most a few thousand points: neighbours are merged as it grows.
  /// Cleared by reset_counters.
  std::vector<ResidencySample> timeline(int device) const;

  /// The number of queued operations, over all streams, that are not done. For tests of schedules.
  std::size_t pending_operations() const;

  /// For tests of failing calls (tests/cpp/doubles/failing_calls.h). The hook runs at each call that may fail, with
  /// the call's name and its requested bytes; the call fails with the exception that the hook throws. A failing wait
  /// has still waited, like CUDA's, which report an earlier error. The hook runs with the runtime's mutex held.
  /// nullptr: no hook.
  using CallHook = std::function<void(std::string_view name, std::size_t bytes)>;
  void set_call_hook(CallHook hook);
  /// For tests of concurrency with a wait: a held device performs no queued copy until it is released.
  /// \throws InvalidArgument for a device that does not exist, and under a seeded schedule
  void hold_device(int device);
  void release_device(int device);
  /// Blocks until a thread waits for queued work.
  void await_waiter();
  /// The number of live allocations of all kinds, events, and created streams; for leak checks.
  std::size_t live_objects() const;

  /// For pthread_atfork. In the child, the queues are empty and workers are started again when needed.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 protected:
  void* do_allocate_managed(std::size_t bytes, Location home) override;
  void do_free_managed(void* ptr, std::size_t bytes) noexcept override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// Pinned host memory, or plain memory of a device.
  struct PlainAllocation {
    std::uintptr_t base = 0;
    std::size_t bytes = 0;
    int device = -1; ///< -1: pinned
    std::size_t reserved = 0; ///< bytes of the device's capacity
  };

  void check_device(int device) const;
  void check_location(Location location) const;

  // All below require the mutex, except free_plain.

  /// Calls the hook. \throws what the hook throws
  void call(std::string_view name, std::size_t bytes = 0) {
    if (call_hook_) {
      call_hook_(name, bytes);
    }
  }
  const PlainAllocation* find_plain(const void* ptr) const;
  bool is_pinned(const void* ptr) const;
  void* add_plain(std::size_t bytes, int device, std::size_t reserved);
  void free_plain(void* ptr, bool pinned);
  /// With one memory: what is not allocated of it, by anybody.
  std::size_t left_of_one_memory() const;
  /// \throws OutOfMemory if that is less than `bytes`
  void check_one_memory(std::size_t bytes) const;
  /// A copy's range must not extend beyond the end of the allocation in which it begins.
  void check_copy_range(const char* side, const void* ptr, std::size_t bytes) const;

  void touch(int device, std::span<const Touch> accesses, emulated::Traffic& traffic);
  void enqueue(emulated::StreamState& stream, emulated::Operation operation);
  /// The queue's callback: updates pages, clocks and counters for one operation.
  void account(emulated::StreamState& stream, const emulated::Operation& operation);
  void account_copy(emulated::StreamState& stream, const emulated::Operation& operation);
  /// Adds a point to all timelines.
  void sample(double time_us);

  const EmulatedConfig config_;
  const CostProfile& profile_;
  mutable std::mutex mutex_;
  mutable emulated::CounterTable counters_;
  emulated::PageTable pages_;
  emulated::EmulatedClock clock_;
  std::vector<emulated::Timeline> timelines_;
  std::map<std::uintptr_t, PlainAllocation> plain_;
  CallHook call_hook_;
  emulated::EmulatedQueue queue_; ///< last: its workers end before the other members are destroyed
};

} // namespace torch_uvm
