// A runtime with no hardware: host memory, with a driver's book-keeping and a model of time.
//
// - Managed memory is host memory cut into 64 KiB pages; each page knows where it is resident, where it
//   is preferred, who has a mapping. Touches (see `touch`) fault, migrate, duplicate and evict as the
//   CUDA driver does, least recently used first.
// - Copies, prefetches and discards are queued, one queue a stream. By default bytes are copied by a
//   worker thread a device, in the order queued, at once, while pages and clocks are brought up to date
//   when the call is made, so that the same program always gives the same figures. A seeded schedule
//   delays all of it, until a wait or at random, so that a missing synchronisation shows;
//   there the calling threads do the work, and a single-threaded program repeats exactly by its seed.
//   Kernels run on the caller's thread, after what is queued on their stream (see `begin_kernel`).
// - A virtual clock a stream, and one for the host, advance by the costs of a profile. The figures are
//   modelled: they speak of memory traffic only, not of arithmetic.
// - Touches by host code are not seen unless the caller reports them.
//
// One mutex guards queues, pages and clocks: a leaf to everything above. Bytes are copied without it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/emulated/model.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

class EmulatedRuntime final : public ManagedRuntime {
 public:
  static constexpr std::size_t kPageBytes = kEmulatedPageBytes;

  /// \throws InvalidArgument for a device count, memory size or profile it does not take
  explicit EmulatedRuntime(const EmulatedConfig& config = {});
  ~EmulatedRuntime() override;

  std::string name() const override {
    return "emulated";
  }
  const EmulatedConfig& config() const;

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
  int device_count() const override;
  DeviceProperties device_properties(int device) const override;
  MemoryInfo memory_info(int device) const override;
  std::size_t host_memory_available() const override;

  // --- what only an emulator has -----------------------------------------------------------------------

  /// A kernel is about to run on the caller's thread as if on `stream`: waits for what is queued there
  /// (not counted as a synchronisation), touches the ranges as that device, and advances the stream's
  /// clock by the modelled cost. Ranges outside managed memory cost device time only.
  void begin_kernel(Stream stream, std::span<const Touch> accesses);

  /// The running kernel has allocated memory that work queued before it may still touch: waits for that, as a launch
  /// behind it would.
  void wait_in_kernel(Stream stream);

  /// The kernel is over: touches the ranges that it made itself and that were not known before.
  void end_kernel(Stream stream, std::span<const Touch> accesses);

  /// Host code uses these ranges: faults, as the host, and advances the host's clock. Waits for nothing.
  void touch_from_host(std::span<const Touch> accesses);

  ResidencyInfo residency(const void* ptr, std::size_t bytes) const;

  // Whether the address lies in managed memory of this runtime, in pinned memory, in plain memory of a device.
  bool is_managed_ptr(const void* ptr) const;
  bool is_pinned_ptr(const void* ptr) const;
  std::optional<int> device_of(const void* ptr) const; ///< nullopt: in no device's

  EmulatedCounters counters(std::optional<int> device = std::nullopt) const; ///< \throws InvalidArgument
  /// Counters become 0, peaks the current levels, timelines empty. The clocks go on.
  void reset_counters();

  std::size_t resident_bytes(int device) const; ///< managed, on that device, now
  std::size_t peak_resident_bytes(int device) const; ///< since the last reset_counters
  double stream_time_us(Stream stream) const; ///< modelled
  /// The latest of all clocks.
  double time_us() const;

  /// Residency of a device over modelled time, at most some thousand points: neighbours are merged as
  /// it grows. Cleared by reset_counters.
  std::vector<ResidencySample> timeline(int device) const;

  /// Queued work that has not been done yet, of all streams. For tests of schedules.
  std::size_t pending_operations() const;

  /// For tests of calls that fail (runtime/testing/emulated_failures.h): called at each call that may fail, with its
  /// name and the bytes that it asks for; the call fails with what this throws. A wait that fails has waited all the
  /// same, as CUDA's do, which report what has gone wrong before. It is called with the runtime's mutex held. nullptr:
  /// none.
  using CallHook = std::function<void(std::string_view name, std::size_t bytes)>;
  void set_call_hook(CallHook hook);
  // For tests of what may go on beside a wait: a held device performs no queued copy until it is released.
  /// \throws InvalidArgument for a device that does not exist, and under a seeded schedule
  void hold_device(int device);
  void release_device(int device);
  /// Waits until a thread waits for queued work.
  void await_waiter();
  /// Live allocations of all kinds, events, and streams that were created: what can leak.
  std::size_t live_objects() const;

  /// For pthread_atfork. In the child the queues are empty and the workers are started anew on demand.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 protected:
  void* do_allocate_managed(std::size_t bytes, Location home) override;
  void do_free_managed(void* ptr, std::size_t bytes) noexcept override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
