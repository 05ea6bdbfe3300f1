// The rig of the arena's tests: an arena on the recording runtime, and helper functions.
#pragma once

#include "allocator/arena/arena.h"
#include "allocator_face.h"

namespace face {

constexpr ArenaOptions kSmall{.home = kHome, .initial = 64 * KiB, .growth = 2.0};

inline Face arena_face(const ArenaOptions& options) {
  return {.make =
              [=](ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream) {
                return std::make_shared<Arena>(runtime, std::move(upstream), options);
              },
          .again = [](Allocator& arena) { static_cast<Arena&>(arena).reset(); }};
}

/// An arena on the recording runtime.
struct ArenaRig : FaceRig {
  explicit ArenaRig(const ArenaOptions& options = kSmall)
      : FaceRig(recording(), arena_face(options), false), arena((make(), static_cast<Arena&>(*allocator))) {
    calls().clear_calls();
  }

  std::int64_t blocks() const { // blocks that the arena owns
    const AllocatorFigures now = arena.figures();
    return now.upstream_allocations - now.upstream_frees;
  }
  std::int64_t asked() const {
    return arena.figures().upstream_allocations;
  }
  /// An allocation that is freed at once: it only advances the top.
  void bump(std::size_t bytes, Stream stream = kStream) {
    arena.free(allocate(bytes, stream));
  }
  std::uintptr_t at(Stream stream = kStream) { // address of the next allocation
    const Allocation probe = allocate(1, stream);
    arena.free(probe);
    return reinterpret_cast<std::uintptr_t>(probe.ptr);
  }
  Event busy(Stream stream) {
    calls().hold(stream);
    return mark(stream);
  }

  Arena& arena;
};

inline std::uintptr_t address(const Allocation& allocation) {
  return reinterpret_cast<std::uintptr_t>(allocation.ptr);
}

constexpr Outlived kNothing{};

} // namespace face
