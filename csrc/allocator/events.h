// Events, kept for reuse: making one costs a call of the runtime, and every cross-stream reuse needs one.
#pragma once

#include <vector>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the allocator's mutex guards it.
class EventPool {
 public:
  EventPool(ManagedRuntime& runtime, int devices) : runtime_(runtime), unused_(static_cast<std::size_t>(devices)) {}
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  /// An event recorded on `stream` now. \throws what the runtime throws, and nothing has changed
  Event record(Stream stream) {
    std::vector<Event>& unused = unused_[static_cast<std::size_t>(stream.device)];
    Event event;
    if (unused.empty()) {
      event = runtime_.create_event(stream.device, false);
    } else {
      event = unused.back();
      unused.pop_back();
    }
    try {
      runtime_.record_event(event, stream);
    } catch (...) {
      give(stream, event);
      throw;
    }
    return event;
  }

  /// An event that `record` made for this stream is not needed any more.
  void give(Stream stream, Event event) noexcept {
    try {
      unused_[static_cast<std::size_t>(stream.device)].push_back(event);
    } catch (...) { // no memory to remember it with
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
  std::vector<std::vector<Event>> unused_; ///< by device
};

} // namespace torch_uvm
