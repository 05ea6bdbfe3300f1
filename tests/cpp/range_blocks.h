// What the tests of address ranges with delayed work share: sizes, a device, an allocator's options.
#pragma once

#include <cstdint>
#include <optional>

#include "allocator/caching/caching_managed_allocator.h"
#include "runtime/bytes.h"
#include "runtime/emulated/emulated_runtime.h"

namespace range_blocks {

using namespace torch_uvm;

constexpr std::size_t kBytes = 4 * MiB; ///< the smallest address range
constexpr std::size_t kDeviceBytes = 64 * MiB;
constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

/// With a seed, queued work runs late, in an order that the seed decides and that streams and events allow.
inline EmulatedConfig config(std::optional<std::uint64_t> seed) {
  EmulatedConfig made;
  made.memory = kDeviceBytes;
  made.schedule_seed = seed;
  return made;
}

inline AllocatorOptions options() {
  AllocatorOptions made;
  made.uses_ranges = true;
  made.range_min_bytes = kBytes;
  return made;
}

} // namespace range_blocks
