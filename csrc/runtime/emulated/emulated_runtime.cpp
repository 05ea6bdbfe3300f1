// EmulatedRuntime as a ManagedRuntime; what only an emulator has is in emulated_inspection.cpp.
#include "runtime/emulated/emulated_runtime.h"

#include <algorithm>
#include <sstream>

#include "runtime/bytes.h"
#include "runtime/emulated/state.h"
#include "runtime/host_memory.h"

namespace torch_uvm {
namespace {

using emulated::CopySide;
using emulated::EmulatedClock;
using emulated::Operation;
using emulated::StreamState;
using emulated::Traffic;

constexpr std::size_t kManagedAlignment = 2 * MiB;
constexpr std::size_t kPlainAlignment = 4 * KiB;
constexpr std::size_t kPlainGranularity = 512; // as a device's allocator rounds

const EmulatedConfig& checked(const EmulatedConfig& config) {
  if (config.devices < 1 || config.devices > EmulatedConfig::kMaxDevices) {
    throw InvalidArgument(std::to_string(config.devices) + " emulated devices; accepted are 1 to " +
                          std::to_string(EmulatedConfig::kMaxDevices));
  }
  if (config.memory < EmulatedConfig::kMinMemory) {
    throw InvalidArgument("emulated devices with " + format_bytes(config.memory) + " of memory; at least " +
                          format_bytes(EmulatedConfig::kMinMemory) + " is needed");
  }
  CostProfile::named(config.profile);
  return config;
}

} // namespace

// --- state ------------------------------------------------------------------------------------------------

EmulatedRuntime::State::State(const EmulatedConfig& wanted)
    : config(checked(wanted)),
      counters(config.devices),
      pages(config.devices, config.memory, counters),
      clock(CostProfile::named(config.profile), config.devices),
      timelines(static_cast<std::size_t>(config.devices)),
      queue(config.devices, config.schedule_seed, mutex,
            [this](StreamState& stream, const Operation& operation) { account(stream, operation); }) {}

EmulatedRuntime::State::~State() {
  queue.stop(); // a worker may still be copying
  for (const auto& [base, allocation] : pages.allocations()) {
    unmap_host_memory(reinterpret_cast<void*>(base), allocation.bytes);
  }
  for (const auto& [base, allocation] : plain) {
    unmap_host_memory(reinterpret_cast<void*>(base), allocation.bytes);
  }
}

void EmulatedRuntime::State::check_device(int device) const {
  if (device < 0 || device >= config.devices) {
    throw InvalidArgument("device " + std::to_string(device) + " does not exist; there are " +
                          std::to_string(config.devices) + " emulated devices, from 0");
  }
}

void EmulatedRuntime::State::check_location(Location location) const {
  if (location != Location::host()) {
    check_device(location.index);
  }
}

const EmulatedRuntime::State::PlainAllocation* EmulatedRuntime::State::find_plain(const void* ptr) const {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  const auto next = plain.upper_bound(address);
  if (next == plain.begin()) {
    return nullptr;
  }
  const auto& [base, allocation] = *std::prev(next);
  return address - base < allocation.bytes ? &allocation : nullptr;
}

void* EmulatedRuntime::State::add_plain(std::size_t bytes, int device, std::size_t reserved) {
  void* ptr = map_host_memory(bytes, kPlainAlignment);
  try {
    plain.emplace(reinterpret_cast<std::uintptr_t>(ptr),
                  PlainAllocation{reinterpret_cast<std::uintptr_t>(ptr), bytes, device, reserved});
  } catch (...) {
    unmap_host_memory(ptr, bytes);
    throw;
  }
  ++counters.of(Location{device}).allocate_calls;
  clock.call();
  return ptr;
}

void EmulatedRuntime::State::free_plain(void* ptr, bool pinned) {
  Lock lock(mutex);
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  const auto found = plain.find(address);
  if (found == plain.end() || (found->second.device < 0) != pinned) {
    return; // not ours: freeing it would be worse than leaking it
  }
  const PlainAllocation freed = found->second;
  queue.drain_range(lock, ptr, freed.bytes);
  plain.erase(address);
  if (!pinned) {
    pages.release_plain(freed.device, freed.reserved);
    sample(freed.device, clock.host());
  }
  ++counters.of(Location{freed.device}).free_calls;
  clock.call();
  unmap_host_memory(ptr, freed.bytes);
}

void EmulatedRuntime::State::check_copy_range(const char* side, const void* ptr, std::size_t bytes) const {
  const auto refuse = [&](const std::string& why) {
    std::ostringstream message;
    message << "copy of " << bytes << " bytes, " << side << " " << ptr << ": " << why;
    throw InvalidArgument(message.str());
  };
  if (ptr == nullptr) {
    refuse("an address is needed");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  std::size_t left = bytes; // ordinary host memory: it is the caller who knows
  if (const auto* allocation = pages.find(ptr)) {
    left = allocation->bytes - (address - allocation->base);
  } else if (const PlainAllocation* allocation = find_plain(ptr)) {
    left = allocation->bytes - (address - allocation->base);
  }
  if (bytes > left) {
    refuse("the allocation there ends after " + std::to_string(left) + " bytes");
  }
}

void EmulatedRuntime::State::account(StreamState& stream, const Operation& operation) {
  const double queued_us = operation.queued_us;
  switch (operation.kind) {
    case Operation::Kind::kCopy:
      account_copy(stream, operation);
      break;
    case Operation::Kind::kZero: { // as a kernel that writes the range
      Traffic traffic;
      pages.touch(Location::device(stream.device), operation.ptr, operation.bytes, true, traffic);
      stream.time_us = clock.fill(stream.device, stream.time_us, queued_us, traffic);
      sample(Location::device(stream.device), traffic, stream.time_us);
      break;
    }
    case Operation::Kind::kPrefetch: {
      Traffic traffic;
      pages.prefetch(pages.require(operation.ptr, operation.bytes), operation.ptr, operation.bytes, operation.to,
                     traffic);
      stream.time_us = clock.prefetch(stream.device, stream.time_us, queued_us, operation.to, traffic);
      sample(operation.to, traffic, stream.time_us);
      break;
    }
    case Operation::Kind::kDiscard:
      pages.discard(pages.require(operation.ptr, operation.bytes), operation.ptr, operation.bytes);
      stream.time_us = clock.discard(stream.device, stream.time_us, queued_us, operation.bytes);
      break;
    case Operation::Kind::kRecord:
      operation.mark->time_us = std::max(stream.time_us, queued_us);
      break;
    case Operation::Kind::kWait:
      stream.time_us = std::max({stream.time_us, queued_us, operation.mark->time_us});
      break;
  }
}

void EmulatedRuntime::State::account_copy(StreamState& stream, const Operation& operation) {
  using Kind = EmulatedClock::CopyKind;
  Traffic traffic;
  bool pageable = false;
  // The device that has the range, or -1.
  const auto side = [&](const void* ptr, bool write) {
    if (auto* allocation = pages.find(ptr)) {
      const CopySide where = pages.copy_side(*allocation, ptr, operation.bytes, stream.device, write, traffic);
      if (where.device >= where.host) {
        return where.device_index;
      }
      pageable = true; // host-resident managed memory is not pinned
      return -1;
    }
    if (const PlainAllocation* allocation = find_plain(ptr)) {
      return allocation->device;
    }
    pageable = true;
    return -1;
  };
  EmulatedClock::Copy copy{Kind::kOnHost};
  copy.from = side(operation.source, false);
  copy.to = side(operation.ptr, true);
  copy.bytes = operation.bytes;
  copy.pageable = pageable;
  if (copy.from < 0 && copy.to >= 0) {
    copy.kind = Kind::kToDevice;
    counters.of(copy.to).bytes_copied_to_device += copy.bytes;
  } else if (copy.from >= 0 && copy.to < 0) {
    copy.kind = Kind::kToHost;
    counters.of(copy.from).bytes_copied_to_host += copy.bytes;
  } else if (copy.from >= 0 && copy.from == copy.to) {
    copy.kind = Kind::kWithinDevice;
  } else if (copy.from >= 0) {
    copy.kind = Kind::kBetweenDevices;
    counters.of(copy.to).bytes_copied_to_device += copy.bytes;
  }
  stream.time_us = clock.copy(stream.device, stream.time_us, operation.queued_us, copy, traffic);
  if (traffic.written_back > 0 || traffic.populated > 0) {
    sample(stream.device, stream.time_us);
  }
}

void EmulatedRuntime::State::sample(int device, double time_us) {
  timelines[static_cast<std::size_t>(device)].add(
      {time_us, pages.resident_bytes(device), pages.plain_bytes(device), pages.managed_bytes()});
}

void EmulatedRuntime::State::sample(Location user, const Traffic& traffic, double time_us) {
  const std::uint64_t changed = traffic.sources | (user.is_host() ? 0 : emulated::bit(user.index));
  for (int device = 0; device < config.devices; ++device) {
    if ((changed & emulated::bit(device)) != 0) {
      sample(device, time_us);
    }
  }
}

void EmulatedRuntime::State::sample_all() {
  for (int device = 0; device < config.devices; ++device) {
    sample(device, clock.host());
  }
}

// --- memory -----------------------------------------------------------------------------------------------

EmulatedRuntime::EmulatedRuntime(const EmulatedConfig& config) : state_(std::make_unique<State>(config)) {}

EmulatedRuntime::~EmulatedRuntime() = default;

const EmulatedConfig& EmulatedRuntime::config() const {
  return state_->config;
}

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
  // What is larger than the device is refused as it is: rounded up it might overflow.
  const std::size_t reserved = bytes > state_->config.memory ? bytes : round_up(bytes, kPlainGranularity);
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
  ++state_->counters.of(stream.device).prefetch_calls;
  state_->clock.call();
  Operation operation;
  operation.kind = Operation::Kind::kPrefetch;
  operation.ptr = ptr;
  operation.bytes = bytes;
  operation.to = to;
  operation.queued_us = state_->clock.host();
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
  ++state_->counters.of(stream.device).discard_calls;
  state_->clock.call();
  Operation operation;
  operation.kind = Operation::Kind::kDiscard;
  operation.ptr = ptr;
  operation.bytes = bytes;
  operation.queued_us = state_->clock.host();
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
  Operation operation;
  operation.kind = Operation::Kind::kCopy;
  operation.ptr = dst;
  operation.source = src;
  operation.bytes = bytes;
  operation.queued_us = state_->clock.host();
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
  Operation operation;
  operation.kind = Operation::Kind::kZero;
  operation.ptr = ptr;
  operation.bytes = bytes;
  operation.queued_us = state_->clock.host();
  state_->queue.enqueue(*on, std::move(operation));
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
  const auto mark = state.mark; // the event may be recorded again, or destroyed, while this waits
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
  return properties;
}

MemoryInfo EmulatedRuntime::memory_info(int device) const {
  state_->check_device(device);
  State::Lock lock(state_->mutex);
  const std::size_t used = state_->pages.plain_bytes(device) + state_->pages.resident_bytes(device);
  return {state_->config.memory - used, state_->config.memory};
}

std::size_t EmulatedRuntime::host_memory_available() const {
  return operating_system_memory_available();
}

} // namespace torch_uvm
