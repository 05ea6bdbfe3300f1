// Locations, streams and events: the plain values that name them.
#pragma once

#include <compare>
#include <cstddef>
#include <functional>
#include <string>

namespace torch_uvm {

/// Where memory can be resident: the host (-1), or a device by its index.
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

/// A stream of a device. `handle` is the runtime's (a cudaStream_t, or a number of the emulated runtime); null is the
/// default stream of `device`. `Stream::host()` means "no stream": host code is done when it returns.
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

/// A point in a stream. The creator owns it and frees it with `ManagedRuntime::destroy_event`.
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
