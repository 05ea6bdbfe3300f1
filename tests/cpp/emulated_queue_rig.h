// Pinned memory and short names for tests of the emulated runtime's streams and events.
#pragma once

#include "emulated_helpers.h"
#include "harness.h"

namespace emulated_helpers {

constexpr std::size_t kBig = 8 * MiB; // too large for a copy by the caller: a worker copies it

inline Stream stream0() {
  return Stream::default_of(0);
}

struct Pinned {
  EmulatedRuntime& runtime;
  int* ptr;
  Pinned(EmulatedRuntime& runtime, std::size_t bytes)
      : runtime(runtime), ptr(static_cast<int*>(runtime.allocate_pinned(bytes))) {}
  ~Pinned() {
    runtime.free_pinned(ptr);
  }
  Pinned(const Pinned&) = delete;
};

} // namespace emulated_helpers
