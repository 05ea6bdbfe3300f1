// The state of a RecordingRuntime.
#pragma once

#include <cstdint>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "doubles/failing_calls.h"
#include "recording/recording_hints.h"
#include "recording/recording_runtime.h"
#include "recording/recording_streams.h"
#include "runtime/host_memory.h"

namespace torch_uvm {
namespace recording {

struct Allocation {
  enum class Kind { kManaged, kPinned, kDevice } kind;
  std::size_t bytes;
  int device = -1;
  std::vector<Hint> hints;
};

inline std::uintptr_t address_of(const void* ptr) {
  return reinterpret_cast<std::uintptr_t>(ptr);
}

} // namespace recording

struct RecordingRuntime::State {
  explicit State(int devices) : devices(devices) {}

  mutable std::mutex mutex;
  const int devices;
  std::vector<RecordedCall> calls;
  FailingCalls failing;
  std::map<std::uintptr_t, recording::Allocation> allocations;
  std::map<Stream, std::shared_ptr<recording::StreamState>> streams; ///< includes default streams once they are used
  std::size_t created_streams = 0;
  std::map<void*, recording::EventState> events;
  std::uintptr_t next_handle = 0; ///< handles are numbers that are never reused, so that stale ones are detected
  std::size_t host_available = std::numeric_limits<std::size_t>::max();

  void* new_handle() {
    return reinterpret_cast<void*>(++next_handle * sizeof(void*));
  }

  /// Records the call, and throws if it is the one that has to fail.
  void record(RecordedCall call) {
    call.failed = failing.counts(call.name);
    calls.push_back(call);
    if (call.failed) {
      FailingCalls::raise("recording", call.name, call.bytes);
    }
  }

  void check_device(int device) const {
    if (device < 0 || device >= devices) {
      throw InvalidArgument("device " + std::to_string(device) + " does not exist; there are " +
                            std::to_string(devices) + " devices");
    }
  }

  void check_location(Location location) const {
    if (location != Location::host()) {
      check_device(location.index);
    }
  }

  std::shared_ptr<recording::StreamState>& stream_at(Stream stream) {
    check_device(stream.device);
    if (stream.handle == nullptr) {
      auto& state = streams[stream];
      if (!state) {
        state = std::make_shared<recording::StreamState>();
      }
      return state;
    }
    const auto found = streams.find(stream);
    if (found == streams.end()) {
      throw InvalidArgument("stream " + std::to_string(recording::address_of(stream.handle)) + " of device " +
                            std::to_string(stream.device) + " does not exist; " + std::to_string(created_streams) +
                            " streams do, and the default ones");
    }
    return found->second;
  }

  recording::EventState& event_at(Event event) {
    const auto found = events.find(event.handle);
    if (found == events.end()) {
      throw InvalidArgument("event " + std::to_string(recording::address_of(event.handle)) + " does not exist; " +
                            std::to_string(events.size()) + " events do");
    }
    return found->second;
  }

  recording::Allocation& managed_range(const void* ptr, std::size_t bytes) {
    auto next = allocations.upper_bound(recording::address_of(ptr));
    if (next != allocations.begin()) {
      auto& [base, allocation] = *std::prev(next);
      const std::size_t offset = recording::address_of(ptr) - base;
      if (allocation.kind == recording::Allocation::Kind::kManaged && offset < allocation.bytes && bytes > 0 &&
          bytes <= allocation.bytes - offset) {
        return allocation;
      }
    }
    throw InvalidArgument("range of " + std::to_string(bytes) + " bytes at " +
                          std::to_string(recording::address_of(ptr)) + " is not within one managed allocation");
  }

  void* allocate(recording::Allocation::Kind kind, std::size_t bytes, std::size_t alignment, int device) {
    void* ptr = map_host_memory(bytes, alignment);
    allocations.emplace(recording::address_of(ptr), recording::Allocation{kind, bytes, device, {}});
    return ptr;
  }

  void release(void* ptr, const char* name, recording::Allocation::Kind kind) {
    if (ptr == nullptr) {
      return;
    }
    const auto found = allocations.find(recording::address_of(ptr));
    const bool known = found != allocations.end() && found->second.kind == kind;
    const std::size_t bytes = known ? found->second.bytes : 0;
    record({name, ptr, bytes, known ? Location{found->second.device} : Location::host(), Stream::host(), false});
    if (known) {
      unmap_host_memory(ptr, bytes);
      allocations.erase(found);
    }
  }

  std::size_t plain_bytes(int device) const {
    std::size_t total = 0;
    for (const auto& [base, allocation] : allocations) {
      if (allocation.kind == recording::Allocation::Kind::kDevice && allocation.device == device) {
        total += allocation.bytes;
      }
    }
    return total;
  }

  void queue_work(Stream stream) {
    ++stream_at(stream)->queued;
  }
};

} // namespace torch_uvm
