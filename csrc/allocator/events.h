// A pool of events. Creating an event costs a runtime call, and every cross-stream reuse needs an event.
#pragma once

#include <vector>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: its owner's mutex guards it.
class EventPool {
 public:
  /// \param timing whether `elapsed_ms` accepts the events
  EventPool(ManagedRuntime& runtime, int devices, bool timing = false)
      : runtime_(runtime), timing_(timing), unused_(static_cast<std::size_t>(devices)) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// Returns an event for `stream` that is still to be recorded. \throws what the runtime throws
  Event take(Stream stream) {
    std::vector<Event>& unused = unused_[static_cast<std::size_t>(stream.device)];
    if (unused.empty()) {
      return runtime_.create_event(stream.device, timing_);
    }
    const Event event = unused.back();
    unused.pop_back();
    return event;
  }

  /// Returns an event recorded on `stream` now. \throws what the runtime throws. Strong guarantee
  Event record(Stream stream) {
    const Event event = take(stream);
    try {
      runtime_.record_event(event, stream);
    } catch (...) {
      give(stream, event);
      throw;
    }
    return event;
  }

  /// Returns an event that `take` or `record` made for a stream of this device to the pool.
  void give(Stream stream, Event event) noexcept {
    try {
      unused_[static_cast<std::size_t>(stream.device)].push_back(event);
    } catch (...) { // out of memory
      runtime_.destroy_event(event);
    }
  }

  void destroy_all() noexcept {
    for (std::vector<Event>& events : unused_) {
      for (const Event event : events) {
        runtime_.destroy_event(event);
      }
      events.clear();
    }
  }

 private:
  ManagedRuntime& runtime_;
  const bool timing_;
  std::vector<std::vector<Event>> unused_; ///< by device
};

} // namespace torch_uvm
