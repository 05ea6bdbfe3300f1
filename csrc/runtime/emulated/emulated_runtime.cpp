// EmulatedRuntime's implementation of ManagedRuntime. operations.cpp has queued work, inspection.cpp what only the
// emulator has.
#include "runtime/emulated/emulated_runtime.h"

#include <algorithm>
#include <string>

#include "runtime/bytes.h"
#include "runtime/host_memory.h"

namespace torch_uvm {
namespace {

constexpr std::size_t kManagedAlignment = 2 * MiB;
constexpr std::size_t kPlainAlignment = 4 * KiB;
constexpr std::size_t kPlainGranularity = 512; // rounding of a device's allocator

const EmulatedConfig& checked(const EmulatedConfig& config) {
  if (config.devices < 1 || config.devices > EmulatedConfig::kMaxDevices) {
    throw InvalidArgument(std::to_string(config.devices) + " emulated devices; accepted are 1 to " +
                          std::to_string(EmulatedConfig::kMaxDevices));
  }
  if (config.memory < EmulatedConfig::kMinMemory) {
    throw InvalidArgument("emulated devices with " + format_bytes(config.memory) + " of memory; at least " +
                          format_bytes(EmulatedConfig::kMinMemory) + " is needed");
  }
  return config;
}

} // namespace

EmulatedRuntime::EmulatedRuntime(const EmulatedConfig& config)
    : config_(checked(config)),
      profile_(CostProfile::named(config.profile)),
      counters_(config.devices),
      pages_(config.devices, config.memory, profile_.memory, counters_),
      clock_(profile_, config.devices),
      timelines_(static_cast<std::size_t>(config.devices)),
      queue_(config.devices, config.schedule_seed, mutex_,
             [this](auto& stream, const auto& operation) { account(stream, operation); }) {}

EmulatedRuntime::~EmulatedRuntime() {
  queue_.stop(); // a worker may still be copying
  for (const auto& [base, allocation] : pages_.allocations()) {
    unmap_host_memory(reinterpret_cast<void*>(base), allocation.bytes);
  }
  for (const auto& [base, allocation] : plain_) {
    unmap_host_memory(reinterpret_cast<void*>(base), allocation.bytes);
  }
}

void EmulatedRuntime::check_device(int device) const {
  if (device < 0 || device >= config_.devices) {
    throw InvalidArgument("device " + std::to_string(device) + " does not exist; there are " +
                          std::to_string(config_.devices) + " emulated devices, from 0");
  }
}

void EmulatedRuntime::check_location(Location location) const {
  if (location != Location::host()) {
    check_device(location.index);
  }
}

// --- memory -----------------------------------------------------------------------------------------------

void* EmulatedRuntime::do_allocate_managed(std::size_t bytes, Location home) {
  {
    const Lock lock(mutex_);
    call("allocate_managed", bytes);
  }
  void* ptr = map_host_memory(bytes, kManagedAlignment);
  Lock lock(mutex_);
  try {
    pages_.add(ptr, bytes, home);
  } catch (...) {
    unmap_host_memory(ptr, bytes);
    throw;
  }
  ++counters_.of(home).allocate_calls;
  clock_.call();
  sample(clock_.host());
  return ptr;
}

void EmulatedRuntime::do_free_managed(void* ptr, std::size_t bytes) noexcept {
  Lock lock(mutex_);
  queue_.drain_range(lock, ptr, bytes);
  if (const auto* allocation = pages_.find(ptr)) {
    ++counters_.of(allocation->home).free_calls;
  }
  pages_.remove(ptr);
  clock_.call();
  sample(clock_.host());
  lock.unlock();
  unmap_host_memory(ptr, bytes);
}

void* EmulatedRuntime::allocate_pinned(std::size_t bytes) {
  if (bytes == 0) {
    throw InvalidArgument("pinned allocation of 0 bytes; at least 1 is needed");
  }
  Lock lock(mutex_);
  call("allocate_pinned", bytes);
  check_one_memory(bytes);
  return add_plain(bytes, -1, 0);
}

void EmulatedRuntime::free_pinned(void* ptr) noexcept {
  free_plain(ptr, true);
}

void* EmulatedRuntime::allocate_device(std::size_t bytes, int device) {
  check_device(device);
  if (bytes == 0) {
    throw InvalidArgument("allocation of 0 bytes on device " + std::to_string(device) + "; at least 1 is needed");
  }
  Lock lock(mutex_);
  call("allocate_device", bytes);
  // A size beyond the device's memory is not rounded: rounding could overflow, and the request is refused anyway.
  const std::size_t reserved = bytes > config_.memory ? bytes : round_up(bytes, kPlainGranularity);
  check_one_memory(reserved);
  emulated::Traffic traffic;
  pages_.reserve_plain(device, reserved, traffic);
  clock_.wait_for_room(device, traffic);
  void* ptr = nullptr;
  try {
    ptr = add_plain(bytes, device, reserved);
  } catch (...) {
    pages_.release_plain(device, reserved);
    throw;
  }
  sample(clock_.host());
  return ptr;
}

void EmulatedRuntime::free_device(void* ptr) noexcept {
  free_plain(ptr, false);
}

const EmulatedRuntime::PlainAllocation* EmulatedRuntime::find_plain(const void* ptr) const {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  const auto next = plain_.upper_bound(address);
  if (next == plain_.begin()) {
    return nullptr;
  }
  const auto& [base, allocation] = *std::prev(next);
  return address - base < allocation.bytes ? &allocation : nullptr;
}

void* EmulatedRuntime::add_plain(std::size_t bytes, int device, std::size_t reserved) {
  void* ptr = map_host_memory(bytes, kPlainAlignment);
  const auto base = reinterpret_cast<std::uintptr_t>(ptr);
  try {
    plain_.emplace(base, PlainAllocation{base, bytes, device, reserved});
  } catch (...) {
    unmap_host_memory(ptr, bytes);
    throw;
  }
  ++counters_.of(Location{device}).allocate_calls;
  clock_.call();
  return ptr;
}

void EmulatedRuntime::free_plain(void* ptr, bool pinned) {
  Lock lock(mutex_);
  const auto found = plain_.find(reinterpret_cast<std::uintptr_t>(ptr));
  if (found == plain_.end() || (found->second.device < 0) != pinned) {
    return; // unknown address: freeing it would be worse than leaking it
  }
  const PlainAllocation freed = found->second;
  queue_.drain_range(lock, ptr, freed.bytes);
  plain_.erase(freed.base);
  if (!pinned) {
    pages_.release_plain(freed.device, freed.reserved);
    sample(clock_.host());
  }
  ++counters_.of(Location{freed.device}).free_calls;
  clock_.call();
  unmap_host_memory(ptr, freed.bytes);
}

std::size_t EmulatedRuntime::left_of_one_memory() const {
  std::size_t used = pages_.managed_bytes();
  for (const auto& [base, allocation] : plain_) {
    used += allocation.device < 0 ? allocation.bytes : allocation.reserved;
  }
  return used < config_.memory ? config_.memory - used : 0;
}

void EmulatedRuntime::check_one_memory(std::size_t bytes) const {
  if (profile_.memory == MemoryKind::kOne && bytes > left_of_one_memory()) {
    throw OutOfMemory(OutOfMemory::Cause::kDevice, bytes,
                      "host and device share one memory of " + format_bytes(config_.memory) + ": " +
                          format_bytes(bytes) + " asked for, " + format_bytes(left_of_one_memory()) + " available");
  }
}

void EmulatedRuntime::advise(void* ptr, std::size_t bytes, Advice advice, Location location) {
  Lock lock(mutex_);
  check_location(location);
  auto& allocation = pages_.require(ptr, bytes);
  call("advise");
  pages_.advise(allocation, ptr, bytes, advice, location);
  ++counters_.of(location).advise_calls;
  clock_.call();
}

RangeAttributes EmulatedRuntime::range_attributes(const void* ptr, std::size_t bytes) const {
  Lock lock(mutex_);
  return pages_.attributes(pages_.require(ptr, bytes), ptr, bytes);
}

// --- streams and events -----------------------------------------------------------------------------------

Stream EmulatedRuntime::create_stream(int device, int /*priority*/) {
  Lock lock(mutex_);
  check_device(device);
  call("create_stream");
  return queue_.create_stream(device);
}

void EmulatedRuntime::destroy_stream(Stream stream) noexcept {
  Lock lock(mutex_);
  queue_.destroy_stream(stream);
}

double EmulatedRuntime::host_ms() const {
  const Lock lock(mutex_);
  return clock_.host() / 1e3;
}

bool EmulatedRuntime::query_stream(Stream stream) {
  if (stream.is_host()) {
    return true;
  }
  Lock lock(mutex_);
  const auto state = queue_.stream(stream);
  call("query_stream");
  const bool done = queue_.idle(*state);
  queue_.tick_for(*state);
  return done;
}

void EmulatedRuntime::synchronize_stream(Stream stream) {
  if (stream.is_host()) {
    return;
  }
  Lock lock(mutex_);
  const auto state = queue_.stream(stream);
  ++counters_.of(stream.device).synchronisations;
  queue_.drain(lock, state);
  clock_.host_waited(state->time_us);
  call("synchronize_stream");
}

void EmulatedRuntime::synchronize_device(int device) {
  Lock lock(mutex_);
  check_device(device);
  ++counters_.of(device).synchronisations;
  queue_.drain_device(lock, device);
  for (const auto& stream : queue_.streams(device)) {
    clock_.host_waited(stream->time_us);
  }
  call("synchronize_device");
}

Event EmulatedRuntime::create_event(int device, bool timing) {
  Lock lock(mutex_);
  check_device(device);
  call("create_event");
  return queue_.create_event(device, timing);
}

void EmulatedRuntime::destroy_event(Event event) noexcept {
  Lock lock(mutex_);
  queue_.destroy_event(event);
}

void EmulatedRuntime::record_event(Event event, Stream stream) {
  Lock lock(mutex_);
  auto& state = queue_.event(event);
  const auto& on = queue_.stream(stream);
  call("record_event");
  ++counters_.of(stream.device).event_records;
  queue_.record(state, on, clock_.host());
}

bool EmulatedRuntime::query_event(Event event) {
  Lock lock(mutex_);
  const auto mark = queue_.event(event).mark;
  call("query_event");
  if (!mark || mark->reached) {
    return true;
  }
  queue_.tick_for(*mark->stream);
  return false;
}

void EmulatedRuntime::synchronize_event(Event event) {
  Lock lock(mutex_);
  const auto& state = queue_.event(event);
  const auto mark = state.mark; // the event may be recorded again, or destroyed, during the wait
  ++counters_.of(state.device).synchronisations;
  queue_.reach(lock, mark);
  if (mark) {
    clock_.host_waited(mark->time_us);
  }
  call("synchronize_event");
}

void EmulatedRuntime::wait_event(Stream stream, Event event) {
  Lock lock(mutex_);
  const auto& state = queue_.event(event);
  const auto& waiting = queue_.stream(stream);
  call("wait_event");
  queue_.wait_for(*waiting, state, clock_.host());
}

double EmulatedRuntime::elapsed_ms(Event from, Event to) {
  constexpr double kMicrosecondsPerMillisecond = 1e3;
  Lock lock(mutex_);
  for (const Event event : {from, to}) {
    const auto& state = queue_.event(event);
    if (!state.timing || !state.mark || !state.mark->reached) {
      throw InvalidArgument(std::string("elapsed time needs two events made with timing, recorded and reached; one ") +
                            (!state.timing ? "was made without timing"
                             : !state.mark ? "was never recorded"
                                           : "is not reached yet"));
    }
  }
  return (queue_.event(to).mark->time_us - queue_.event(from).mark->time_us) / kMicrosecondsPerMillisecond;
}

// --- devices ----------------------------------------------------------------------------------------------

int EmulatedRuntime::device_count() const {
  return config_.devices;
}

DeviceProperties EmulatedRuntime::device_properties(int device) const {
  check_device(device);
  DeviceProperties properties;
  properties.name = "Emulated " + config_.profile;
  properties.total_memory = config_.memory;
  properties.page_bytes = kPageBytes;
  const MemoryKind memory = profile_.memory;
  properties.integrated = memory == MemoryKind::kOne;
  properties.host_page_tables = memory != MemoryKind::kSeparate;
  properties.direct_managed_access = memory == MemoryKind::kCoherent;
  properties.pageable_memory_access = properties.host_page_tables;
  return properties;
}

MemoryInfo EmulatedRuntime::memory_info(int device) const {
  check_device(device);
  switch (profile_.memory) {
    case MemoryKind::kOne:
      return {host_memory_available(), config_.memory};
    case MemoryKind::kCoherent: // the operating system's figures cover both memories
      return {host_memory_available(), operating_system_memory_total()};
    case MemoryKind::kSeparate:
      break;
  }
  Lock lock(mutex_);
  const std::size_t used = pages_.plain_bytes(device) + pages_.resident_bytes(device);
  return {config_.memory - used, config_.memory};
}

std::size_t EmulatedRuntime::host_memory_available() const {
  const std::size_t available = operating_system_memory_available();
  if (profile_.memory != MemoryKind::kOne) {
    return available;
  }
  Lock lock(mutex_);
  return std::min(available, left_of_one_memory());
}

} // namespace torch_uvm
