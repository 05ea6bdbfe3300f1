// Helpers for tests of caps and evictions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "allocator_rig.h"
#include "recording/recording_runtime.h"
#include "runtime/emulated/emulated_runtime.h"

namespace contract {

/// The part of a hard cap that the segment of small requests takes. A cap of kForSmall + N leaves room for one segment
/// of N.
constexpr std::size_t kForSmall = 2 * MiB;

inline void* tag_of(std::size_t number) {
  return reinterpret_cast<void*>(number);
}
inline std::size_t number_of(void* tag) {
  return reinterpret_cast<std::uintptr_t>(tag);
}
inline double free_of_cost(void*, std::size_t) {
  return 0;
}
inline double by_bytes(void*, std::size_t bytes) {
  return static_cast<double>(bytes);
}

/// Runs a body on every runtime, with managed and with device memory. A failure's message names the combination.
inline void on_each(const std::function<void(Rig&)>& body) {
  const auto emulated = [](std::optional<std::uint64_t> seed, bool managed) {
    EmulatedConfig config;
    config.devices = 2;
    config.memory = 1 * GiB;
    config.schedule_seed = seed;
    return Rig(std::make_unique<EmulatedRuntime>(config), managed);
  };
  const auto on = [&](const char* name, Rig rig) {
    try {
      body(rig);
      rig.check();
    } catch (const harness::Failure& failure) {
      throw harness::Failure(std::string(name) + ": " + failure.what());
    }
  };
  on("recording, managed", Rig(std::make_unique<RecordingRuntime>(2), true));
  on("recording, device", Rig(std::make_unique<RecordingRuntime>(2), false));
  on("emulated, managed", emulated(std::nullopt, true));
  on("emulated, device", emulated(std::nullopt, false));
  on("delayed, managed", emulated(5, true));
  on("delayed, device", emulated(5, false));
}

inline std::int64_t reserved_on(const Rig& rig, int device = 0) {
  return rig.allocator->statistics(Location::device(device)).reserved_bytes[0].current;
}

} // namespace contract
