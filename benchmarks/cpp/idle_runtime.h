// A segment source without memory and a runtime whose calls do nothing, for the allocator's benchmarks.
#pragma once

#include <atomic>
#include <cstdint>

#include "allocator/segment_source.h"
#include "runtime/bytes.h"
#include "runtime/managed_runtime.h"

namespace bench {

using namespace torch_uvm;

/// Returns addresses without memory behind them. The allocator never accesses the memory that it allocates, so a heap
/// of 10^5 blocks uses no memory.
class AddressesOnly final : public SegmentSource {
 public:
  void* allocate(std::size_t bytes, Location /*home*/) override {
    return reinterpret_cast<void*>(next_.fetch_add(round_up(bytes, 2 * MiB)));
  }
  void free(void* /*ptr*/, std::size_t /*bytes*/) noexcept override {}
  bool is_managed() const override {
    return true;
  }

 private:
  std::atomic<std::uintptr_t> next_{std::uintptr_t{1} << 40};
};

/// A runtime with two devices whose calls do nothing: the warm path calls no runtime function.
class IdleRuntime : public ManagedRuntime {
 public:
  void prefetch(void*, std::size_t, Location, Stream) override {}
  void advise(void*, std::size_t, Advice, Location) override {}
  void discard(void*, std::size_t, Stream) override {}
  RangeAttributes range_attributes(const void*, std::size_t) const override {
    return {};
  }
  void* allocate_pinned(std::size_t) override {
    throw RuntimeFailure("an idle runtime has no memory");
  }
  void free_pinned(void*) noexcept override {}
  void* allocate_device(std::size_t, int) override {
    throw RuntimeFailure("an idle runtime has no memory");
  }
  void free_device(void*) noexcept override {}
  void copy_async(void*, const void*, std::size_t, Stream) override {}
  void zero_async(void*, std::size_t, Stream) override {}
  void delay(double, Stream) override {}
  Stream create_stream(int device, int) override {
    return Stream{device, this};
  }
  void destroy_stream(Stream) noexcept override {}
  bool query_stream(Stream) override {
    return true;
  }
  void synchronize_stream(Stream) override {}
  void synchronize_device(int) override {}
  Event create_event(int, bool) override {
    return Event{this};
  }
  void destroy_event(Event) noexcept override {}
  void record_event(Event, Stream) override {}
  bool query_event(Event) override {
    return true;
  }
  void synchronize_event(Event) override {}
  void wait_event(Stream, Event) override {}
  double elapsed_ms(Event, Event) override {
    return 0;
  }
  int device_count() const override {
    return 2;
  }
  DeviceProperties device_properties(int) const override {
    return {};
  }
  MemoryInfo memory_info(int) const override {
    return {std::size_t{1} << 50, std::size_t{1} << 50};
  }
  std::size_t host_memory_available() const override {
    return std::size_t{1} << 50;
  }

 protected:
  void* do_allocate_managed(std::size_t, Location) override {
    throw RuntimeFailure("an idle runtime has no memory");
  }
  void do_free_managed(void*, std::size_t) noexcept override {}
};

} // namespace bench
