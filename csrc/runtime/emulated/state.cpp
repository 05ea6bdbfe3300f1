// State of an emulated runtime: plain allocations, the cost of operations, points of timelines.
#include "runtime/emulated/state.h"

#include <sstream>
#include <string>

#include "runtime/bytes.h"
#include "runtime/emulated/cost_profile.h"
#include "runtime/host_memory.h"

namespace torch_uvm {
namespace {

using emulated::CopySide;
using emulated::EmulatedClock;
using emulated::Operation;
using emulated::StreamState;
using emulated::Traffic;

constexpr std::size_t kPlainAlignment = 4 * KiB;

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

EmulatedRuntime::State::State(const EmulatedConfig& wanted)
    : config(checked(wanted)),
      profile(CostProfile::named(config.profile)),
      counters(config.devices),
      pages(config.devices, config.memory, profile.memory, counters),
      clock(profile, config.devices),
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

std::size_t EmulatedRuntime::State::left_of_one_memory() const {
  std::size_t used = pages.managed_bytes();
  for (const auto& [base, allocation] : plain) {
    used += allocation.device < 0 ? allocation.bytes : allocation.reserved;
  }
  return used < config.memory ? config.memory - used : 0;
}

void EmulatedRuntime::State::check_one_memory(std::size_t bytes) const {
  if (profile.memory == MemoryKind::kOne && bytes > left_of_one_memory()) {
    throw OutOfMemory(OutOfMemory::Cause::kDevice, bytes,
                      "host and device share one memory of " + format_bytes(config.memory) + ": " +
                          format_bytes(bytes) + " asked for, " + format_bytes(left_of_one_memory()) + " available");
  }
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
    return; // unknown address: freeing it would be worse than leaking it
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
  std::size_t left = bytes; // ordinary host memory: its size is unknown, so the caller is trusted
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
    case Operation::Kind::kZero: { // like a kernel that writes the range
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
  // Returns the device on which the range resides, or -1.
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

} // namespace torch_uvm
