// Where bytes can be, and the streams that touch them.
#pragma once

#include <compare>
#include <cstddef>
#include <functional>
#include <string>

namespace torch_uvm {

/// A place that memory can live in: the host, or a device by its index.
struct Location {
  int index = -1;

  static constexpr Location host() {
    return Location{-1};
  }
  static constexpr Location device(int index) {
    return Location{index};
  }
  constexpr bool is_host() const {
    return index < 0;
  }
  auto operator<=>(const Location&) const = default;
};

/// "host" or "device 3".
inline std::string to_string(Location location) {
  return location.is_host() ? "host" : "device " + std::to_string(location.index);
}

/// A queue of work on a device, in order. `handle` is the runtime's own (a cudaStream_t, an emulated
/// queue); null is the default stream of `device`. The host has no queue: work of the host is over
/// when its code returns, so `Stream::host()` only says "no stream".
struct Stream {
  int device = -1;
  void* handle = nullptr;

  static constexpr Stream host() {
    return Stream{};
  }
  static constexpr Stream default_of(int device) {
    return Stream{device, nullptr};
  }
  constexpr bool is_host() const {
    return device < 0;
  }
  auto operator<=>(const Stream&) const = default;
};

/// A point in a stream. Owned by whoever created it, freed by `ManagedRuntime::destroy_event`.
struct Event {
  void* handle = nullptr;

  explicit operator bool() const {
    return handle != nullptr;
  }
  auto operator<=>(const Event&) const = default;
};

} // namespace torch_uvm

template <>
struct std::hash<torch_uvm::Stream> {
  std::size_t operator()(const torch_uvm::Stream& stream) const noexcept {
    return std::hash<void*>{}(stream.handle) ^ static_cast<std::size_t>(stream.device + 1) * 0x9E3779B97F4A7C15ULL;
  }
};
