// EmulatedRuntime's implementation of ManagedRuntime. inspection.cpp has the functions that only the emulator has.
#include "runtime/emulated/emulated_runtime.h"

#include <algorithm>

#include "runtime/bytes.h"
#include "runtime/emulated/state.h"
#include "runtime/host_memory.h"

namespace torch_uvm {
namespace {

using emulated::Operation;
using emulated::Traffic;

constexpr std::size_t kManagedAlignment = 2 * MiB;
constexpr std::size_t kPlainGranularity = 512; // rounding of a device's allocator

} // namespace

// --- memory -----------------------------------------------------------------------------------------------

EmulatedRuntime::EmulatedRuntime(const EmulatedConfig& config) : state_(std::make_unique<State>(config)) {}

EmulatedRuntime::~EmulatedRuntime() = default;

void* EmulatedRuntime::do_allocate_managed(std::size_t bytes, Location home) {
  {
    const State::Lock lock(state_->mutex);
    state_->call("allocate_managed", bytes);
  }
  void* ptr = map_host_memory(bytes, kManagedAlignment);
  State::Lock lock(state_->mutex);
  try {
    state_->pages.add(ptr, bytes, home);
  } catch (...) {
    unmap_host_memory(ptr, bytes);
    throw;
  }
  ++state_->counters.of(home).allocate_calls;
  state_->clock.call();
  state_->sample_all();
  return ptr;
}

void EmulatedRuntime::do_free_managed(void* ptr, std::size_t bytes) noexcept {
  State::Lock lock(state_->mutex);
  state_->queue.drain_range(lock, ptr, bytes);
  if (const auto* allocation = state_->pages.find(ptr)) {
    ++state_->counters.of(allocation->home).free_calls;
  }
  state_->pages.remove(ptr);
  state_->clock.call();
  state_->sample_all();
  lock.unlock();
  unmap_host_memory(ptr, bytes);
}

void* EmulatedRuntime::allocate_pinned(std::size_t bytes) {
  if (bytes == 0) {
    throw InvalidArgument("pinned allocation of 0 bytes; at least 1 is needed");
  }
  State::Lock lock(state_->mutex);
  state_->call("allocate_pinned", bytes);
  state_->check_one_memory(bytes);
  return state_->add_plain(bytes, -1, 0);
}

void EmulatedRuntime::free_pinned(void* ptr) noexcept {
  state_->free_plain(ptr, true);
}

void* EmulatedRuntime::allocate_device(std::size_t bytes, int device) {
  state_->check_device(device);
  if (bytes == 0) {
    throw InvalidArgument("allocation of 0 bytes on device " + std::to_string(device) + "; at least 1 is needed");
  }
  State::Lock lock(state_->mutex);
  state_->call("allocate_device", bytes);
  // A size beyond the device's memory is not rounded: rounding could overflow, and the request is refused anyway.
  const std::size_t reserved = bytes > state_->config.memory ? bytes : round_up(bytes, kPlainGranularity);
  state_->check_one_memory(reserved);
  Traffic traffic;
  state_->pages.reserve_plain(device, reserved, traffic);
  state_->clock.wait_for_room(device, traffic);
  void* ptr = nullptr;
  try {
    ptr = state_->add_plain(bytes, device, reserved);
  } catch (...) {
    state_->pages.release_plain(device, reserved);
    throw;
  }
  state_->sample(device, state_->clock.host());
  return ptr;
}

void EmulatedRuntime::free_device(void* ptr) noexcept {
  state_->free_plain(ptr, false);
}

void EmulatedRuntime::prefetch(void* ptr, std::size_t bytes, Location to, Stream stream) {
  State::Lock lock(state_->mutex);
  state_->check_location(to);
  const auto& on = state_->queue.stream(stream);
  state_->pages.require(ptr, bytes);
  state_->call("prefetch");
  if (device_properties(stream.device).one_memory()) {
    return;
  }
  ++state_->counters.of(stream.device).prefetch_calls;
  state_->clock.call();
  Operation operation = Operation::on(Operation::Kind::kPrefetch, ptr, bytes, state_->clock.host());
  operation.to = to;
  state_->queue.enqueue(*on, std::move(operation));
}

void EmulatedRuntime::advise(void* ptr, std::size_t bytes, Advice advice, Location location) {
  State::Lock lock(state_->mutex);
  state_->check_location(location);
  auto& allocation = state_->pages.require(ptr, bytes);
  state_->call("advise");
  state_->pages.advise(allocation, ptr, bytes, advice, location);
  ++state_->counters.of(location).advise_calls;
  state_->clock.call();
}

void EmulatedRuntime::discard(void* ptr, std::size_t bytes, Stream stream) {
  State::Lock lock(state_->mutex);
  const auto& on = state_->queue.stream(stream);
  state_->pages.require(ptr, bytes);
  state_->call("discard");
  if (device_properties(stream.device).one_memory()) {
    return;
  }
  ++state_->counters.of(stream.device).discard_calls;
  state_->clock.call();
  Operation operation = Operation::on(Operation::Kind::kDiscard, ptr, bytes, state_->clock.host());
  state_->queue.enqueue(*on, std::move(operation));
}

RangeAttributes EmulatedRuntime::range_attributes(const void* ptr, std::size_t bytes) const {
  State::Lock lock(state_->mutex);
  return state_->pages.attributes(state_->pages.require(ptr, bytes), ptr, bytes);
}

void EmulatedRuntime::copy_async(void* dst, const void* src, std::size_t bytes, Stream stream) {
  State::Lock lock(state_->mutex);
  const auto& on = state_->queue.stream(stream);
  if (bytes == 0) {
    return;
  }
  state_->check_copy_range("to", dst, bytes);
  state_->check_copy_range("from", src, bytes);
  state_->call("copy_async");
  ++state_->counters.of(stream.device).copy_calls;
  state_->clock.call();
  Operation operation = Operation::on(Operation::Kind::kCopy, dst, bytes, state_->clock.host());
  operation.source = src;
  state_->queue.enqueue(*on, std::move(operation));
}

void EmulatedRuntime::zero_async(void* ptr, std::size_t bytes, Stream stream) {
  State::Lock lock(state_->mutex);
  const auto& on = state_->queue.stream(stream);
  if (bytes == 0) {
    return;
  }
  state_->check_copy_range("to", ptr, bytes);
  state_->call("zero_async");
  ++state_->counters.of(stream.device).zero_calls;
  state_->clock.call();
  Operation operation = Operation::on(Operation::Kind::kZero, ptr, bytes, state_->clock.host());
  state_->queue.enqueue(*on, std::move(operation));
}

void EmulatedRuntime::delay(double us, Stream stream) {
  State::Lock lock(state_->mutex);
  const auto& on = state_->queue.stream(stream);
  state_->call("delay");
  state_->clock.call();
  // The clock alone: kernels run when they are launched, and only times are told apart.
  on->time_us = std::max(on->time_us, state_->clock.host()) + us;
}

// --- streams and events -----------------------------------------------------------------------------------

Stream EmulatedRuntime::create_stream(int device, int /*priority*/) {
  State::Lock lock(state_->mutex);
  state_->check_device(device);
  state_->call("create_stream");
  return state_->queue.create_stream(device);
}

void EmulatedRuntime::destroy_stream(Stream stream) noexcept {
  State::Lock lock(state_->mutex);
  state_->queue.destroy_stream(stream);
}

bool EmulatedRuntime::query_stream(Stream stream) {
  if (stream.is_host()) {
    return true;
  }
  State::Lock lock(state_->mutex);
  const auto state = state_->queue.stream(stream);
  state_->call("query_stream");
  const bool done = state_->queue.idle(*state);
  state_->queue.tick_for(*state);
  return done;
}

void EmulatedRuntime::synchronize_stream(Stream stream) {
  if (stream.is_host()) {
    return;
  }
  State::Lock lock(state_->mutex);
  const auto state = state_->queue.stream(stream);
  ++state_->counters.of(stream.device).synchronisations;
  state_->queue.drain(lock, state);
  state_->clock.host_waited(state->time_us);
  state_->call("synchronize_stream");
}

void EmulatedRuntime::synchronize_device(int device) {
  State::Lock lock(state_->mutex);
  state_->check_device(device);
  ++state_->counters.of(device).synchronisations;
  state_->queue.drain_device(lock, device);
  for (const auto& stream : state_->queue.streams(device)) {
    state_->clock.host_waited(stream->time_us);
  }
  state_->call("synchronize_device");
}

Event EmulatedRuntime::create_event(int device, bool timing) {
  State::Lock lock(state_->mutex);
  state_->check_device(device);
  state_->call("create_event");
  return state_->queue.create_event(device, timing);
}

void EmulatedRuntime::destroy_event(Event event) noexcept {
  State::Lock lock(state_->mutex);
  state_->queue.destroy_event(event);
}

void EmulatedRuntime::record_event(Event event, Stream stream) {
  State::Lock lock(state_->mutex);
  auto& state = state_->queue.event(event);
  const auto& on = state_->queue.stream(stream);
  state_->call("record_event");
  ++state_->counters.of(stream.device).event_records;
  state_->queue.record(state, on, state_->clock.host());
}

bool EmulatedRuntime::query_event(Event event) {
  State::Lock lock(state_->mutex);
  const auto mark = state_->queue.event(event).mark;
  state_->call("query_event");
  if (!mark || mark->reached) {
    return true;
  }
  state_->queue.tick_for(*mark->stream);
  return false;
}

void EmulatedRuntime::synchronize_event(Event event) {
  State::Lock lock(state_->mutex);
  const auto& state = state_->queue.event(event);
  const auto mark = state.mark; // the event may be recorded again, or destroyed, during the wait
  ++state_->counters.of(state.device).synchronisations;
  state_->queue.reach(lock, mark);
  if (mark) {
    state_->clock.host_waited(mark->time_us);
  }
  state_->call("synchronize_event");
}

void EmulatedRuntime::wait_event(Stream stream, Event event) {
  State::Lock lock(state_->mutex);
  const auto& state = state_->queue.event(event);
  const auto& waiting = state_->queue.stream(stream);
  state_->call("wait_event");
  state_->queue.wait_for(*waiting, state, state_->clock.host());
}

double EmulatedRuntime::elapsed_ms(Event from, Event to) {
  constexpr double kMicrosecondsPerMillisecond = 1e3;
  State::Lock lock(state_->mutex);
  for (const Event event : {from, to}) {
    const auto& state = state_->queue.event(event);
    if (!state.timing || !state.mark || !state.mark->reached) {
      throw InvalidArgument(std::string("elapsed time needs two events made with timing, recorded and reached; one ") +
                            (!state.timing ? "was made without timing"
                             : !state.mark ? "was never recorded"
                                           : "is not reached yet"));
    }
  }
  return (state_->queue.event(to).mark->time_us - state_->queue.event(from).mark->time_us) /
         kMicrosecondsPerMillisecond;
}

// --- devices ----------------------------------------------------------------------------------------------

int EmulatedRuntime::device_count() const {
  return state_->config.devices;
}

DeviceProperties EmulatedRuntime::device_properties(int device) const {
  state_->check_device(device);
  DeviceProperties properties;
  properties.name = "Emulated " + state_->config.profile;
  properties.total_memory = state_->config.memory;
  properties.page_bytes = kPageBytes;
  const MemoryKind memory = state_->profile.memory;
  properties.integrated = memory == MemoryKind::kOne;
  properties.host_page_tables = memory != MemoryKind::kSeparate;
  properties.direct_managed_access = memory == MemoryKind::kCoherent;
  properties.pageable_memory_access = properties.host_page_tables;
  return properties;
}

MemoryInfo EmulatedRuntime::memory_info(int device) const {
  state_->check_device(device);
  switch (state_->profile.memory) {
    case MemoryKind::kOne:
      return {host_memory_available(), state_->config.memory};
    case MemoryKind::kCoherent: // the operating system's figures cover both memories
      return {host_memory_available(), operating_system_memory_total()};
    case MemoryKind::kSeparate:
      break;
  }
  State::Lock lock(state_->mutex);
  const std::size_t used = state_->pages.plain_bytes(device) + state_->pages.resident_bytes(device);
  return {state_->config.memory - used, state_->config.memory};
}

std::size_t EmulatedRuntime::host_memory_available() const {
  const std::size_t available = operating_system_memory_available();
  if (state_->profile.memory != MemoryKind::kOne) {
    return available;
  }
  State::Lock lock(state_->mutex);
  return std::min(available, state_->left_of_one_memory());
}

} // namespace torch_uvm
