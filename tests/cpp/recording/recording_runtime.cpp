#include "recording/recording_runtime.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "recording/recording_state.h"
#include "runtime/bytes.h"

namespace torch_uvm {
namespace {

using recording::address_of;
using recording::Allocation;

constexpr std::size_t kManagedAlignment = 2 * MiB;
constexpr std::size_t kOtherAlignment = 4 * KiB;
constexpr std::size_t kDeviceMemory = 16 * GiB;

} // namespace

RecordingRuntime::RecordingRuntime(int devices) {
  if (devices < 1) {
    throw InvalidArgument("recording runtime with " + std::to_string(devices) + " devices; at least 1 is needed");
  }
  state_ = std::make_unique<State>(devices);
}

RecordingRuntime::~RecordingRuntime() {
  for (const auto& [base, allocation] : state_->allocations) {
    unmap_host_memory(reinterpret_cast<void*>(base), allocation.bytes);
  }
  // Streams that wait for each other, destroyed ones included, would keep each other alive.
  std::vector<std::shared_ptr<recording::StreamState>> left;
  for (const auto& [stream, state] : state_->streams) {
    left.push_back(state);
  }
  while (!left.empty()) {
    const auto state = std::move(left.back());
    left.pop_back();
    const auto waits = std::exchange(state->waits, {});
    for (const auto& [position, point] : waits) {
      if (point.stream) {
        left.push_back(point.stream);
      }
    }
  }
}

// --- memory ---------------------------------------------------------------------------------------------

void* RecordingRuntime::do_allocate_managed(std::size_t bytes, Location home) {
  std::lock_guard lock(state_->mutex);
  state_->record({"allocate_managed", nullptr, bytes, home, Stream::host(), false});
  void* ptr = state_->allocate(Allocation::Kind::kManaged, bytes, kManagedAlignment, home.index);
  state_->calls.back().ptr = ptr;
  return ptr;
}

void RecordingRuntime::do_free_managed(void* ptr, std::size_t /*bytes*/) noexcept {
  std::lock_guard lock(state_->mutex);
  state_->release(ptr, "free_managed", Allocation::Kind::kManaged);
}

void* RecordingRuntime::allocate_pinned(std::size_t bytes) {
  std::lock_guard lock(state_->mutex);
  if (bytes == 0) {
    throw InvalidArgument("pinned allocation of 0 bytes; at least 1 is needed");
  }
  state_->record({"allocate_pinned", nullptr, bytes, Location::host(), Stream::host(), false});
  void* ptr = state_->allocate(Allocation::Kind::kPinned, bytes, kOtherAlignment, -1);
  state_->calls.back().ptr = ptr;
  return ptr;
}

void RecordingRuntime::free_pinned(void* ptr) noexcept {
  std::lock_guard lock(state_->mutex);
  state_->release(ptr, "free_pinned", Allocation::Kind::kPinned);
}

void* RecordingRuntime::allocate_device(std::size_t bytes, int device) {
  std::lock_guard lock(state_->mutex);
  state_->check_device(device);
  if (bytes == 0) {
    throw InvalidArgument("device allocation of 0 bytes; at least 1 is needed");
  }
  state_->record({"allocate_device", nullptr, bytes, Location::device(device), Stream::host(), false});
  const std::size_t used = state_->plain_bytes(device);
  if (bytes > kDeviceMemory - used) {
    throw OutOfMemory(OutOfMemory::Cause::kDevice, bytes,
                      "device " + std::to_string(device) + ": " + format_bytes(bytes) + " asked for, " +
                          format_bytes(used) + " of " + format_bytes(kDeviceMemory) + " in use");
  }
  void* ptr = state_->allocate(Allocation::Kind::kDevice, bytes, kManagedAlignment, device);
  state_->calls.back().ptr = ptr;
  return ptr;
}

void RecordingRuntime::free_device(void* ptr) noexcept {
  std::lock_guard lock(state_->mutex);
  state_->release(ptr, "free_device", Allocation::Kind::kDevice);
}

void RecordingRuntime::prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) {
  std::lock_guard lock(state_->mutex);
  Allocation& allocation = state_->managed_range(ptr, bytes);
  state_->check_location(to);
  state_->stream_at(stream);
  state_->record({"prefetch", ptr, bytes, to, stream, false});
  allocation.hints.push_back({address_of(ptr), address_of(ptr) + bytes, std::nullopt, to});
  state_->queue_work(stream);
}

void RecordingRuntime::advise(void* ptr, std::size_t bytes, Advice advice, Location location) {
  std::lock_guard lock(state_->mutex);
  Allocation& allocation = state_->managed_range(ptr, bytes);
  state_->check_location(location);
  state_->record({"advise", ptr, bytes, location, Stream::host(), false});
  allocation.hints.push_back({address_of(ptr), address_of(ptr) + bytes, advice, location});
}

void RecordingRuntime::discard(void* ptr, std::size_t bytes, Stream stream) {
  std::lock_guard lock(state_->mutex);
  state_->managed_range(ptr, bytes);
  state_->stream_at(stream);
  state_->record({"discard", ptr, bytes, Location::device(stream.device), stream, false});
  state_->queue_work(stream);
}

RangeAttributes RecordingRuntime::range_attributes(const void* ptr, std::size_t bytes) const {
  std::lock_guard lock(state_->mutex);
  const Allocation& allocation = state_->managed_range(ptr, bytes);
  const std::uintptr_t begin = address_of(ptr);
  return recording::attributes_of(allocation.hints, begin, begin + bytes);
}

void RecordingRuntime::copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) {
  std::lock_guard lock(state_->mutex);
  state_->stream_at(stream);
  state_->record({"copy_async", dst, bytes, Location::device(stream.device), stream, false});
  std::memmove(dst, src, bytes);
  state_->queue_work(stream);
}

void RecordingRuntime::zero_async(void* ptr, std::size_t bytes, Stream stream) {
  std::lock_guard lock(state_->mutex);
  state_->stream_at(stream);
  state_->record({"zero_async", ptr, bytes, Location::device(stream.device), stream, false});
  std::memset(ptr, 0, bytes);
  state_->queue_work(stream);
}

void RecordingRuntime::delay(double us, Stream stream) {
  std::lock_guard lock(state_->mutex);
  state_->stream_at(stream);
  state_->record({"delay", nullptr, static_cast<std::size_t>(us), Location::device(stream.device), stream, false});
  state_->queue_work(stream);
}

// --- streams and events -----------------------------------------------------------------------------------

Stream RecordingRuntime::create_stream(int device, int /*priority*/) {
  std::lock_guard lock(state_->mutex);
  state_->check_device(device);
  const Stream stream{device, state_->new_handle()};
  state_->record({"create_stream", nullptr, 0, Location::device(device), stream, false});
  state_->streams.emplace(stream, std::make_shared<recording::StreamState>());
  ++state_->created_streams;
  return stream;
}

void RecordingRuntime::destroy_stream(Stream stream) noexcept {
  std::lock_guard lock(state_->mutex);
  state_->record({"destroy_stream", nullptr, 0, Location{stream.device}, stream, false});
  const auto found = state_->streams.find(stream);
  if (stream.handle == nullptr || found == state_->streams.end()) {
    return;
  }
  found->second->held = false; // it could not be released afterwards
  state_->streams.erase(found);
  --state_->created_streams;
}

bool RecordingRuntime::query_stream(Stream stream) {
  std::lock_guard lock(state_->mutex);
  state_->record({"query_stream", nullptr, 0, Location{stream.device}, stream, false});
  if (stream.is_host()) {
    return true;
  }
  const auto& state = state_->stream_at(stream);
  return recording::reached({state, state->queued});
}

void RecordingRuntime::synchronize_stream(Stream stream) {
  std::lock_guard lock(state_->mutex);
  state_->record({"synchronize_stream", nullptr, 0, Location{stream.device}, stream, false});
  if (stream.is_host()) {
    return;
  }
  const auto& state = state_->stream_at(stream);
  recording::force({state, state->queued});
}

void RecordingRuntime::synchronize_device(int device) {
  std::lock_guard lock(state_->mutex);
  state_->check_device(device);
  state_->record({"synchronize_device", nullptr, 0, Location::device(device), Stream::default_of(device), false});
  for (const auto& [stream, state] : state_->streams) {
    if (stream.device == device) {
      recording::force({state, state->queued});
    }
  }
}

Event RecordingRuntime::create_event(int device, bool timing) {
  std::lock_guard lock(state_->mutex);
  state_->check_device(device);
  const Event event{state_->new_handle()};
  state_->record({"create_event", event.handle, 0, Location::device(device), Stream::host(), false});
  state_->events.emplace(event.handle, recording::EventState{device, timing, {}});
  return event;
}

void RecordingRuntime::destroy_event(Event event) noexcept {
  if (!event) {
    return;
  }
  std::lock_guard lock(state_->mutex);
  state_->record({"destroy_event", event.handle, 0, Location::host(), Stream::host(), false});
  state_->events.erase(event.handle);
}

void RecordingRuntime::record_event(Event event, Stream stream) {
  std::lock_guard lock(state_->mutex);
  recording::EventState& state = state_->event_at(event);
  const auto& queue = state_->stream_at(stream);
  state_->record({"record_event", event.handle, 0, Location{stream.device}, stream, false});
  state.point = {queue, ++queue->queued};
}

bool RecordingRuntime::query_event(Event event) {
  std::lock_guard lock(state_->mutex);
  const recording::EventState& state = state_->event_at(event);
  state_->record({"query_event", event.handle, 0, Location{state.device}, Stream::host(), false});
  return recording::reached(state.point);
}

void RecordingRuntime::synchronize_event(Event event) {
  std::lock_guard lock(state_->mutex);
  const recording::EventState& state = state_->event_at(event);
  state_->record({"synchronize_event", event.handle, 0, Location{state.device}, Stream::host(), false});
  recording::force(state.point);
}

void RecordingRuntime::wait_event(Stream stream, Event event) {
  std::lock_guard lock(state_->mutex);
  const recording::EventState& state = state_->event_at(event);
  const auto& queue = state_->stream_at(stream);
  state_->record({"wait_event", event.handle, 0, Location{stream.device}, stream, false});
  ++queue->queued;
  if (!recording::reached(state.point)) {
    queue->waits.emplace(queue->queued, state.point);
  }
}

double RecordingRuntime::elapsed_ms(Event from, Event to) {
  std::lock_guard lock(state_->mutex);
  for (const Event event : {from, to}) {
    const recording::EventState& state = state_->event_at(event);
    if (!state.timing || !state.point.stream || !recording::reached(state.point)) {
      throw InvalidArgument("elapsed time needs two events that were made with timing, recorded and reached");
    }
  }
  return 0; // work takes no time here
}

// --- devices ------------------------------------------------------------------------------------------------

int RecordingRuntime::device_count() const {
  return state_->devices;
}

DeviceProperties RecordingRuntime::device_properties(int device) const {
  state_->check_device(device);
  DeviceProperties properties;
  properties.name = "Recording device";
  properties.total_memory = kDeviceMemory;
  properties.page_bytes = kManagedAlignment;
  return properties;
}

MemoryInfo RecordingRuntime::memory_info(int device) const {
  std::lock_guard lock(state_->mutex);
  state_->check_device(device);
  return {kDeviceMemory - state_->plain_bytes(device), kDeviceMemory};
}

std::size_t RecordingRuntime::host_memory_available() const {
  std::lock_guard lock(state_->mutex);
  return state_->host_available;
}

// --- functions for tests only --------------------------------------------------------------------------------

std::vector<RecordedCall> RecordingRuntime::calls() const {
  std::lock_guard lock(state_->mutex);
  return state_->calls;
}

std::size_t RecordingRuntime::count(std::string_view name) const {
  std::lock_guard lock(state_->mutex);
  return static_cast<std::size_t>(std::count_if(state_->calls.begin(), state_->calls.end(),
                                                [&](const RecordedCall& call) { return call.name == name; }));
}

void RecordingRuntime::clear_calls() {
  std::lock_guard lock(state_->mutex);
  state_->calls.clear();
}

void RecordingRuntime::fail(std::string_view name, std::size_t nth) {
  std::lock_guard lock(state_->mutex);
  state_->failing.fail(name, nth);
}

void RecordingRuntime::clear_failures() {
  std::lock_guard lock(state_->mutex);
  state_->failing.clear();
}

void RecordingRuntime::hold(Stream stream) {
  std::lock_guard lock(state_->mutex);
  recording::hold(*state_->stream_at(stream));
}

void RecordingRuntime::release(Stream stream) {
  std::lock_guard lock(state_->mutex);
  state_->stream_at(stream)->held = false;
}

void RecordingRuntime::set_host_memory_available(std::size_t bytes) {
  std::lock_guard lock(state_->mutex);
  state_->host_available = bytes;
}

std::size_t RecordingRuntime::live_objects() const {
  std::lock_guard lock(state_->mutex);
  return state_->allocations.size() + state_->events.size() + state_->created_streams;
}

} // namespace torch_uvm
