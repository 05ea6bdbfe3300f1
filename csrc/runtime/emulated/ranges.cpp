#include "runtime/emulated/ranges.h"

#include <string>

#include "runtime/bytes.h"
#include "runtime/emulated/state.h"

namespace torch_uvm {
namespace {

constexpr std::size_t kGranularity = 2 * MiB; // an H200's

} // namespace

EmulatedRuntime::Ranges::~Ranges() {
  for (const auto& [base, range] : ranges_) {
    unmap_host_memory(reinterpret_cast<void*>(base), range.bytes);
  }
}

std::size_t EmulatedRuntime::Ranges::granularity(int device) const {
  state_.check_location(Location{device});
  return kGranularity;
}

void EmulatedRuntime::Ranges::check(const char* what, std::size_t bytes, int device) const {
  state_.check_location(Location{device});
  if (bytes == 0 || bytes % kGranularity != 0) {
    throw InvalidArgument(std::string(what) + " of " + std::to_string(bytes) +
                          " bytes; accepted: positive multiples of " + std::to_string(kGranularity));
  }
}

void* EmulatedRuntime::Ranges::reserve(std::size_t bytes, int device) {
  check("an address range", bytes, device);
  const State::Lock lock(state_.mutex);
  state_.call("reserve_range", bytes);
  void* const range = reserve_addresses(bytes, kGranularity);
  try {
    ranges_.emplace(reinterpret_cast<std::uintptr_t>(range), Range{bytes, device});
  } catch (...) {
    unmap_host_memory(range, bytes);
    throw;
  }
  state_.clock.call();
  return range;
}

void EmulatedRuntime::Ranges::release(void* range, std::size_t bytes) noexcept {
  const State::Lock lock(state_.mutex);
  const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(range));
  if (found == ranges_.end() || found->second.bytes != bytes || found->second.piece != 0) {
    return; // leaking it is safer
  }
  ranges_.erase(found);
  state_.clock.call();
  unmap_host_memory(range, bytes);
}

Piece EmulatedRuntime::Ranges::allocate_piece(std::size_t bytes, int device) {
  check("a piece", bytes, device);
  const State::Lock lock(state_.mutex);
  state_.call("allocate_piece", bytes);
  state_.check_one_memory(bytes);
  const Location home{device};
  if (!home.is_host()) {
    emulated::Traffic traffic;
    state_.pages.reserve_plain(device, bytes, traffic);
    state_.clock.wait_for_room(device, traffic);
  }
  try {
    pieces_.emplace(next_, Memory{file_.append(bytes), bytes, device});
  } catch (...) {
    if (!home.is_host()) {
      state_.pages.release_plain(device, bytes);
    }
    throw;
  }
  piece_bytes_ += bytes;
  ++state_.counters.of(home).allocate_calls;
  state_.clock.call(state_.profile.allocate_piece_us);
  if (!home.is_host()) {
    state_.sample(device, state_.clock.host());
  }
  return Piece{reinterpret_cast<void*>(next_++), bytes, device};
}

void EmulatedRuntime::Ranges::free_piece(Piece piece) noexcept {
  const State::Lock lock(state_.mutex);
  const auto number = reinterpret_cast<Number>(piece.handle);
  const auto found = pieces_.find(number);
  if (found == pieces_.end() || found->second.released) {
    return;
  }
  found->second.released = true;
  ++state_.counters.of(Location{found->second.device}).free_calls;
  state_.clock.call();
  drop_if_unused(number);
}

void EmulatedRuntime::Ranges::drop_if_unused(Number number) noexcept {
  const auto found = pieces_.find(number);
  const Memory memory = found->second;
  if (!memory.released || memory.mappings != 0) {
    return;
  }
  file_.drop(memory.offset, memory.bytes);
  pieces_.erase(found);
  piece_bytes_ -= memory.bytes;
  if (!Location{memory.device}.is_host()) {
    state_.pages.release_plain(memory.device, memory.bytes);
    state_.sample(memory.device, state_.clock.host());
  }
}

EmulatedRuntime::Ranges::Memory& EmulatedRuntime::Ranges::memory_of(Piece piece) {
  const auto found = pieces_.find(reinterpret_cast<Number>(piece.handle));
  if (found == pieces_.end()) {
    throw InvalidArgument("a piece that does not exist; accepted: those of allocate_piece that are not released");
  }
  return found->second;
}

double EmulatedRuntime::Ranges::host_pages_us(const Memory& memory, double rate) {
  return Location{memory.device}.is_host() ? static_cast<double>(memory.bytes) / rate * 1e6 : 0;
}

EmulatedRuntime::Ranges::Range& EmulatedRuntime::Ranges::range_at(void* range, std::size_t bytes) {
  const auto found = ranges_.find(reinterpret_cast<std::uintptr_t>(range));
  if (found == ranges_.end()) {
    throw InvalidArgument("an address range that does not exist; accepted: those of reserve");
  }
  if (found->second.bytes != bytes) {
    throw InvalidArgument("a piece of " + format_bytes(bytes) + " for an address range of " +
                          format_bytes(found->second.bytes) + "; accepted: one of the same size");
  }
  return found->second;
}

void EmulatedRuntime::Ranges::map(void* range, Piece piece, int device) {
  const State::Lock lock(state_.mutex);
  Memory& memory = memory_of(piece);
  Range& at = range_at(range, memory.bytes);
  const Location owner{memory.device};
  if (memory.released || at.piece != 0 || at.device != device || (!owner.is_host() && owner.index != device)) {
    throw InvalidArgument(memory.released ? "a piece that was released cannot be mapped"
                          : at.piece != 0
                              ? "an address range holds one piece; unmap the present one first"
                              : "a piece of " + to_string(owner) + " for an address range of " +
                                    to_string(Location{at.device}) + ", said to be of " + to_string(Location{device}));
  }
  state_.call("map", memory.bytes);
  file_.map(range, memory.offset, memory.bytes);
  at.piece = reinterpret_cast<Number>(piece.handle);
  ++memory.mappings;
  ++state_.counters.of(Location{device}).map_calls;
  state_.clock.call(state_.profile.map_us + host_pages_us(memory, state_.profile.map_host_rate));
}

void EmulatedRuntime::Ranges::unmap(void* range, Piece piece) {
  const State::Lock lock(state_.mutex);
  Memory& memory = memory_of(piece);
  Range& at = range_at(range, memory.bytes);
  const auto number = reinterpret_cast<Number>(piece.handle);
  if (at.piece != number) {
    throw InvalidArgument("a piece that is not mapped into that address range cannot be unmapped from it");
  }
  if (state_.queue.uses(range, at.bytes)) {
    throw InvalidArgument("queued work uses an address range that is to lose its memory; wait for the work first");
  }
  state_.call("unmap", memory.bytes);
  MemoryFile::unmap(range, at.bytes);
  at.piece = 0;
  --memory.mappings;
  ++state_.counters.of(Location{at.device}).unmap_calls;
  state_.clock.call(state_.profile.unmap_us + host_pages_us(memory, state_.profile.unmap_host_rate));
  drop_if_unused(number);
}

std::optional<EmulatedRuntime::Ranges::Place> EmulatedRuntime::Ranges::find(const void* ptr) const {
  const auto address = reinterpret_cast<std::uintptr_t>(ptr);
  const auto next = ranges_.upper_bound(address);
  if (next == ranges_.begin()) {
    return std::nullopt;
  }
  const auto& [base, range] = *std::prev(next);
  if (address - base >= range.bytes) {
    return std::nullopt;
  }
  const bool is_mapped = range.piece != 0;
  return Place{base + range.bytes, range.device, is_mapped, is_mapped ? pieces_.at(range.piece).device : range.device};
}

} // namespace torch_uvm
