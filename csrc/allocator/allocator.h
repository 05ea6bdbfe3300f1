// What gives out memory: the caching allocator, an arena, a plan, a pool, and adaptors around any of them. They nest:
// most have an upstream, from which they take memory in larger pieces, or through which they pass each request.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// What all allocators promise to align to: vectorised kernels want no more.
constexpr std::size_t kAllocationAlignment = 256;

/// A piece of memory, as whoever gave it out knows it. A handle: copied freely, freed once.
struct Allocation {
  void* ptr = nullptr;
  std::size_t bytes = 0; ///< as asked for
  void* handle = nullptr; ///< the allocator's own

  explicit operator bool() const {
    return ptr != nullptr;
  }
};

/// What an allocator has now, and what it has done since it was made.
struct AllocatorFigures {
  std::int64_t allocations = 0; ///< in callers' hands
  std::int64_t requested_bytes = 0; ///< of these, as asked for
  std::int64_t reserved_bytes = 0; ///< taken from upstream; of an adaptor, its upstream's
  std::int64_t peak_requested_bytes = 0;
  std::int64_t peak_reserved_bytes = 0;
  std::int64_t upstream_allocations = 0; ///< calls of the upstream, or of the runtime, that made memory
  std::int64_t upstream_frees = 0;
  std::int64_t events_recorded = 0;
};

/// Thread-safe. Outlives what it has given out: whoever keeps an allocation keeps its allocator, too.
class Allocator {
 public:
  virtual ~Allocator() = default;
  Allocator() = default;
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  /// At least `bytes`, aligned to kAllocationAlignment. No bytes: an empty allocation.
  /// \param home where it is used first; \param stream the stream that uses it first, Stream::host() for the host
  /// \throws OutOfMemory; InvalidArgument for a home or stream that it does not serve; RuntimeFailure. Nothing has
  ///         changed then
  virtual Allocation allocate(std::size_t bytes, Location home, Stream stream) = 0;

  /// Gives it back, in the order of the stream that it was allocated for. An empty one is ignored.
  virtual void free(const Allocation& allocation) noexcept = 0;

  /// Says that `stream`, too, uses it: it is not used for anything else before the work queued there by the time of
  /// `free` is done. \throws InvalidArgument; RuntimeFailure
  virtual void record_stream(const Allocation& allocation, Stream stream) = 0;

  /// Gives back to the upstream what nobody uses. \return bytes \throws RuntimeFailure
  virtual std::size_t release() = 0;

  /// Whether it has memory for that home; what it does not serve, others do.
  virtual bool serves(Location /*home*/) const {
    return true;
  }

  virtual AllocatorFigures figures() const = 0;

  /// As users see it, its upstream included: "arena(caching)".
  virtual std::string description() const = 0;
};

} // namespace torch_uvm
