// The current stream of a thread, and events recorded on a stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tensor/process/context.h"

namespace torch_uvm {

/// The calling thread's current stream, as the runtime knows it. \param device of an accelerator, with its index
inline Stream current_stream_of(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return {device.index(), guard.getStreamNativeHandle(guard.getStream(device))};
}

/// Destroyed with its scope. What waits for it already still waits.
class RecordedEvent {
 public:
  /// \throws what the runtime throws
  explicit RecordedEvent(Stream stream)
      : runtime_(Context::get().runtime()), event_(runtime_.create_event(stream.device, /*timing=*/false)) {
    try {
      runtime_.record_event(event_, stream);
    } catch (...) {
      runtime_.destroy_event(event_);
      throw;
    }
  }
  ~RecordedEvent() {
    runtime_.destroy_event(event_);
  }
  RecordedEvent(const RecordedEvent&) = delete;
  RecordedEvent& operator=(const RecordedEvent&) = delete;

  /// Blocks the host until the work that was queued on the stream is done.
  void synchronize() const {
    runtime_.synchronize_event(event_);
  }
  /// Makes `stream` wait for that work.
  void block(Stream stream) const {
    runtime_.wait_event(stream, event_);
  }

 private:
  ManagedRuntime& runtime_;
  const Event event_;
};

} // namespace torch_uvm
