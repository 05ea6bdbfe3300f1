// Streams, events and captures. Work is done as it is queued, unless a test holds it back.
#include "state.h"

using namespace fake_cuda;

namespace fake_cuda {

std::shared_ptr<StreamState> State::stream(cudaStream_t handle) {
  // The three handles of default streams are one here.
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) {
    return current().default_stream;
  }
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

cudaError_t State::queue(const char* name, cudaStream_t handle, bool may_be_captured) {
  const std::shared_ptr<StreamState> found = stream(handle);
  if (found == nullptr) {
    complain(std::string(name) + " on a stream that is not there");
    return cudaErrorInvalidResourceHandle;
  }
  if (found->device != current_device) {
    complain(std::string(name) + " on a stream of another device than the current one");
    return cudaErrorInvalidResourceHandle;
  }
  if (found->capture != cudaStreamCaptureStatusNone && !may_be_captured) {
    found->capture = cudaStreamCaptureStatusInvalidated;
    complain(std::string(name) + " on a stream that is captured");
    return cudaErrorStreamCaptureUnsupported;
  }
  ++found->queued;
  if (!hold) {
    wait(*found);
  }
  return cudaSuccess;
}

} // namespace fake_cuda

namespace {

cudaError_t create(const char* name, cudaStream_t* out, unsigned int flags, int priority) {
  return call(name, Kind::kPlain, [&](State& state) {
    auto made = std::make_shared<StreamState>();
    state.current();
    made->device = current_device;
    made->blocking = (flags & cudaStreamNonBlocking) == 0;
    made->priority = priority;
    *out = state.make_handle<cudaStream_t>();
    state.streams.emplace(*out, std::move(made));
    return cudaSuccess;
  });
}

cudaError_t make_event(const char* name, cudaEvent_t* out, unsigned int flags) {
  return call(name, Kind::kPlain, [&](State& state) {
    auto made = std::make_unique<EventState>();
    state.current();
    made->device = current_device;
    made->timing = (flags & cudaEventDisableTiming) == 0;
    *out = state.make_handle<cudaEvent_t>();
    state.events.emplace(*out, std::move(made));
    return cudaSuccess;
  });
}

EventState* event_of(State& state, const char* name, cudaEvent_t event) {
  const auto found = state.events.find(event);
  if (found == state.events.end()) {
    state.complain(std::string(name) + " of an event that is not there");
    return nullptr;
  }
  return found->second.get();
}

cudaError_t record(const char* name, cudaEvent_t handle, cudaStream_t stream) {
  return call(name, Kind::kPlain, [&](State& state) -> cudaError_t {
    EventState* const event = event_of(state, name, handle);
    if (event == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    const cudaError_t status = state.queue(name, stream, true);
    if (status != cudaSuccess) {
      return status;
    }
    event->stream = state.stream(stream);
    if (event->stream->device != event->device) {
      state.complain(std::string(name) + " of an event that was made on another device");
      return cudaErrorInvalidResourceHandle;
    }
    event->position = event->stream->queued;
    event->captured = event->stream->capture != cudaStreamCaptureStatusNone;
    return cudaSuccess;
  });
}

} // namespace

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return create("cudaStreamCreate", stream, cudaStreamDefault, 0);
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return create("cudaStreamCreateWithFlags", stream, flags, 0);
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  return create("cudaStreamCreateWithPriority", stream, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  return call("cudaStreamDestroy", Kind::kPlain, [&](State& state) {
    const auto found = state.streams.find(stream);
    if (found == state.streams.end()) {
      state.complain("cudaStreamDestroy of a stream that is not there");
      return cudaErrorInvalidResourceHandle;
    }
    state.wait(*found->second); // its work goes on; events that were recorded there keep the state
    state.streams.erase(found);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return call("cudaStreamQuery", Kind::kUnsafe, [&](State& state) {
    const auto found = state.stream(stream);
    if (found == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    return found->done >= found->queued ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  return call("cudaStreamSynchronize", Kind::kUnsafe, [&](State& state) {
    const auto found = state.stream(stream);
    if (found == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    state.wait(*found);
    return cudaSuccess;
  });
}

cudaError_t cudaDeviceSynchronize() {
  return call("cudaDeviceSynchronize", Kind::kUnsafe, [&](State& state) {
    state.wait(*state.current().default_stream);
    for (const auto& [handle, stream] : state.streams) {
      if (stream->device == current_device) {
        state.wait(*stream);
      }
    }
    return cudaSuccess;
  });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  return call("cudaStreamWaitEvent", Kind::kPlain, [&](State& state) {
    return event_of(state, "cudaStreamWaitEvent", event) == nullptr ? cudaErrorInvalidResourceHandle
                                                                    : state.queue("cudaStreamWaitEvent", stream, true);
  });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  return call("cudaStreamGetPriority", Kind::kPlain, [&](State& state) {
    const auto found = state.stream(stream);
    *priority = found == nullptr ? 0 : found->priority;
    return found == nullptr ? cudaErrorInvalidResourceHandle : cudaSuccess;
  });
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return call("cudaDeviceGetStreamPriorityRange", Kind::kPlain, [&](State&) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void* data, unsigned int) {
  const cudaError_t status = call("cudaStreamAddCallback", Kind::kPlain,
                                  [&](State& state) { return state.queue("cudaStreamAddCallback", stream, true); });
  if (status == cudaSuccess) {
    callback(stream, cudaSuccess, data); // without the lock
  }
  return status;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  const cudaError_t status = call("cudaLaunchHostFunc", Kind::kPlain,
                                  [&](State& state) { return state.queue("cudaLaunchHostFunc", stream, true); });
  if (status == cudaSuccess) {
    function(data);
  }
  return status;
}

// --- events

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return make_event("cudaEventCreate", event, cudaEventDefault);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  return make_event("cudaEventCreateWithFlags", event, flags);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  return call("cudaEventDestroy", Kind::kPlain, [&](State& state) {
    if (event_of(state, "cudaEventDestroy", event) == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    state.events.erase(event);
    return cudaSuccess;
  });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return record("cudaEventRecord", event, stream);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) {
  return record("cudaEventRecordWithFlags", event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  return call("cudaEventQuery", Kind::kUnsafe, [&](State& state) {
    const EventState* const event = event_of(state, "cudaEventQuery", handle);
    if (event == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (event->captured) {
      return cudaErrorCapturedEvent;
    }
    return event->stream == nullptr || event->stream->done >= event->position ? cudaSuccess : cudaErrorNotReady;
  });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  return call("cudaEventSynchronize", Kind::kUnsafe, [&](State& state) {
    const EventState* const event = event_of(state, "cudaEventSynchronize", handle);
    if (event == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    if (event->captured) {
      return cudaErrorCapturedEvent;
    }
    if (event->stream != nullptr) {
      state.wait(*event->stream);
    }
    return cudaSuccess;
  });
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return call("cudaEventElapsedTime", Kind::kPlain, [&](State& state) -> cudaError_t {
    const EventState* const first = event_of(state, "cudaEventElapsedTime", from);
    const EventState* const second = event_of(state, "cudaEventElapsedTime", to);
    if (first == nullptr || second == nullptr || !first->timing || !second->timing || first->stream == nullptr ||
        second->stream == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    *ms = static_cast<float>(second->position) - static_cast<float>(first->position); // a millisecond an operation
    return cudaSuccess;
  });
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return call("cudaIpcGetEventHandle", Kind::kPlain, [&](State&) { return cudaErrorNotSupported; });
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
  return call("cudaIpcOpenEventHandle", Kind::kPlain, [&](State&) { return cudaErrorNotSupported; });
}

// --- captures

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return call("cudaStreamBeginCapture", Kind::kPlain, [&](State& state) {
    const auto found = state.streams.find(stream);
    if (found == state.streams.end() || found->second->capture != cudaStreamCaptureStatusNone) {
      return cudaErrorStreamCaptureUnsupported; // the legacy default stream cannot be captured
    }
    found->second->capture = cudaStreamCaptureStatusActive;
    found->second->mode = mode;
    found->second->capture_id = state.next_handle++;
    found->second->capturing_thread = this_thread();
    return cudaSuccess;
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return call("cudaStreamEndCapture", Kind::kPlain, [&](State& state) {
    const auto found = state.streams.find(stream);
    if (found == state.streams.end() || found->second->capture == cudaStreamCaptureStatusNone) {
      return cudaErrorIllegalState;
    }
    const bool broken = found->second->capture == cudaStreamCaptureStatusInvalidated;
    found->second->capture = cudaStreamCaptureStatusNone;
    *graph = nullptr;
    if (broken) {
      return cudaErrorStreamCaptureInvalidated;
    }
    *graph = state.make_handle<cudaGraph_t>();
    state.graphs.insert(*graph);
    return cudaSuccess;
  });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  return call("cudaStreamIsCapturing", Kind::kPlain, [&](State& state) {
    const auto found = state.stream(stream);
    if (found == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    *status = found->capture;
    return cudaSuccess;
  });
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, std::size_t* count) {
  return call("cudaStreamGetCaptureInfo", Kind::kPlain, [&](State& state) {
    const auto found = state.stream(stream);
    if (found == nullptr) {
      return cudaErrorInvalidResourceHandle;
    }
    *status = found->capture;
    if (id != nullptr) {
      *id = found->capture_id;
    }
    if (graph != nullptr) {
      *graph = nullptr;
    }
    if (dependencies != nullptr) {
      *dependencies = nullptr;
    }
    if (edges != nullptr) {
      *edges = nullptr;
    }
    if (count != nullptr) {
      *count = 0;
    }
    return cudaSuccess;
  });
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

} // extern "C"
