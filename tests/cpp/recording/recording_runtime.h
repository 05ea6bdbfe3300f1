// A runtime for tests: real host memory, a record of every call, and the Nth call of a kind can be made to fail.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// One call, with those of its arguments that apply.
struct RecordedCall {
  std::string name; ///< "allocate_managed", "prefetch", "record_event", ...
  const void* ptr = nullptr;
  std::size_t bytes = 0;
  Location location; ///< a home, a destination or an advised location
  Stream stream;
  bool failed = false; ///< the test made it fail
};

/// Tests control when work on streams completes. By default it completes at once. After `hold(stream)`, work recorded
/// on that stream stays incomplete until `release(stream)`. A synchronisation that depends on held work releases it.
class RecordingRuntime : public ManagedRuntime {
 public:
  explicit RecordingRuntime(int devices = 1);
  ~RecordingRuntime() override;

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
  int device_count() const override;
  DeviceProperties device_properties(int device) const override;
  MemoryInfo memory_info(int device) const override;
  std::size_t host_memory_available() const override;

  // --- functions for tests only --------------------------------------------------------------------------

  std::vector<RecordedCall> calls() const;
  std::size_t count(std::string_view name) const;
  void clear_calls();

  /// The `nth` call named `name` from now on (1: the next one) fails: an allocation with OutOfMemory, any other call
  /// with RuntimeFailure. Destroy and free functions never fail. The name "*" counts every call that can fail.
  /// \throws InvalidArgument for a name that cannot fail, and for nth = 0
  void fail(std::string_view name, std::size_t nth);
  /// Cancels all pending failures.
  void clear_failures();

  void hold(Stream stream);
  void release(Stream stream);

  void set_host_memory_available(std::size_t bytes);

  /// The number of live allocations of all kinds, events and streams: 0 if nothing has leaked.
  std::size_t live_objects() const;

 protected:
  void* do_allocate_managed(std::size_t bytes, Location home) override;
  void do_free_managed(void* ptr, std::size_t bytes) noexcept override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
