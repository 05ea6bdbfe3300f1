// The interface of all allocators: the caching allocator, the arena, the allocation plan, the pool, and the adaptors
// around them. Allocators nest. Most have an upstream, from which they take memory in larger pieces or to which they
// forward each request.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/error.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Alignment that every allocator guarantees. Sufficient for vectorised kernels.
constexpr std::size_t kAllocationAlignment = 256;

/// An allocated piece of memory. A handle: may be copied, must be freed once.
struct Allocation {
  void* ptr = nullptr;
  std::size_t bytes = 0; ///< as requested
  void* handle = nullptr; ///< private to the allocator
  Stream stream = {}; ///< private to adaptors: the stream that it was requested for

  explicit operator bool() const {
    return ptr != nullptr;
  }
};

/// Current state of an allocator, and counts since its creation.
struct AllocatorFigures {
  std::int64_t allocations = 0; ///< not yet freed
  std::int64_t requested_bytes = 0; ///< of these allocations, before rounding
  std::int64_t reserved_bytes = 0; ///< taken from the upstream; an adaptor reports its upstream's
  std::int64_t peak_requested_bytes = 0;
  std::int64_t peak_reserved_bytes = 0;
  std::int64_t upstream_allocations = 0; ///< calls of the upstream, or of the runtime, that allocated memory
  std::int64_t upstream_frees = 0;
  std::int64_t events_recorded = 0;

  // For allocators that keep such figures themselves. Not thread-safe.
  void count_allocated(std::size_t bytes) noexcept {
    ++allocations;
    requested_bytes += static_cast<std::int64_t>(bytes);
    peak_requested_bytes = std::max(peak_requested_bytes, requested_bytes);
  }
  void count_freed(std::size_t bytes) noexcept {
    --allocations;
    requested_bytes -= static_cast<std::int64_t>(bytes);
  }
  void count_reserved(std::size_t bytes) noexcept {
    ++upstream_allocations;
    reserved_bytes += static_cast<std::int64_t>(bytes);
    peak_reserved_bytes = std::max(peak_reserved_bytes, reserved_bytes);
  }
  void count_released(std::size_t bytes) noexcept {
    ++upstream_frees;
    reserved_bytes -= static_cast<std::int64_t>(bytes);
  }
};

/// Thread-safe. Must outlive its allocations: an owner of an allocation must also keep its allocator alive.
class Allocator {
 public:
  virtual ~Allocator() = default;
  Allocator() = default;
  Allocator(const Allocator&) = delete;
  Allocator& operator=(const Allocator&) = delete;

  /// Allocates at least `bytes`, aligned to kAllocationAlignment. 0 bytes give an empty allocation.
  /// \param home where the memory is used first
  /// \param stream the stream that uses it first; Stream::host() for the host
  /// \throws OutOfMemory; InvalidArgument for a home or stream that it does not serve; RuntimeFailure. Strong guarantee
  virtual Allocation allocate(std::size_t bytes, Location home, Stream stream) = 0;

  /// Frees an allocation in the order of its stream. An empty allocation is ignored.
  virtual void free(const Allocation& allocation) noexcept = 0;

  /// Records that `stream` also uses the allocation. The memory is not reused before the work queued on `stream` at the
  /// time of `free` is done. \throws InvalidArgument; RuntimeFailure
  virtual void record_stream(const Allocation& allocation, Stream stream) = 0;

  /// Releases unused memory to the upstream. \return bytes released \throws RuntimeFailure
  virtual std::size_t release() = 0;

  /// Whether it can allocate for that home. A caller routes other homes to another allocator.
  virtual bool serves(Location /*home*/) const {
    return true;
  }

  virtual AllocatorFigures figures() const = 0;

  /// User-visible name, including the upstream: "arena(caching)".
  virtual std::string description() const = 0;
};

/// \return the upstream
/// \throws InvalidArgument if there is none
/// \param whose who needs it, for the message
inline std::shared_ptr<Allocator> required(std::shared_ptr<Allocator> upstream, const char* whose) {
  if (upstream == nullptr) {
    throw InvalidArgument(std::string(whose) + " with no upstream");
  }
  return upstream;
}

} // namespace torch_uvm
