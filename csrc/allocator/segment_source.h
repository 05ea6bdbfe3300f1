// Where a caching allocator gets its segments from.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

#include "runtime/bytes.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// A supplier of segments, aligned to 512 bytes at least (2 MiB for those that large, but pinned ones). Thread-safe.
/// `allocate` throws OutOfMemory where memory is refused, RuntimeFailure for all else that goes wrong;
/// `free` does not throw, and waits for device work that may still touch the segment.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  virtual void* allocate(std::size_t bytes, Location home) = 0;
  virtual void free(void* ptr) noexcept = 0;
  /// Whether pages of a segment can move, so that hints about them make sense.
  virtual bool is_managed() const = 0;
  /// Whether it has segments of that home.
  virtual bool serves(Location home) const {
    return is_managed() || !home.is_host();
  }
  /// Medium and large requests share segments of at least that many bytes, because making one is slow; 0: any size
  /// is as good.
  virtual std::size_t least_shared_segment() const {
    return 0;
  }
};

/// Segments of managed memory: addressable from everywhere, under the runtime's limit.
class ManagedSegmentSource final : public SegmentSource {
 public:
  explicit ManagedSegmentSource(ManagedRuntime& runtime) : runtime_(runtime) {}
  void* allocate(std::size_t bytes, Location home) override {
    return runtime_.allocate_managed(bytes, home);
  }
  void free(void* ptr) noexcept override {
    runtime_.free_managed(ptr);
  }
  bool is_managed() const override {
    return true;
  }

 private:
  ManagedRuntime& runtime_;
};

/// Segments of plain device memory, as a native allocator has them; its homes are devices only.
class DeviceSegmentSource final : public SegmentSource {
 public:
  explicit DeviceSegmentSource(ManagedRuntime& runtime) : runtime_(runtime) {}
  void* allocate(std::size_t bytes, Location home) override {
    return runtime_.allocate_device(bytes, home.index);
  }
  void free(void* ptr) noexcept override {
    runtime_.free_device(ptr);
  }
  bool is_managed() const override {
    return false;
  }

 private:
  ManagedRuntime& runtime_;
};

/// Segments of pinned host memory, under a limit of their own; their home is the host only.
class PinnedSegmentSource final : public SegmentSource {
 public:
  explicit PinnedSegmentSource(ManagedRuntime& runtime, std::optional<std::size_t> limit = std::nullopt)
      : runtime_(runtime), limit_(limit) {}
  void* allocate(std::size_t bytes, Location home) override;
  void free(void* ptr) noexcept override;
  bool is_managed() const override {
    return false;
  }
  bool serves(Location home) const override {
    return home.is_host();
  }
  std::size_t least_shared_segment() const override {
    return 64 * MiB; // pinning runs at a few GB/s and holds up every other call of the driver
  }

  /// The most bytes pinned at any time; nullopt: none. What is pinned above it already stays.
  void set_limit(std::optional<std::size_t> bytes);
  std::optional<std::size_t> limit() const;
  std::size_t bytes() const; ///< pinned now

 private:
  ManagedRuntime& runtime_;
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  std::optional<std::size_t> limit_;
  std::size_t bytes_ = 0; ///< those that the runtime is being asked for included
  std::map<void*, std::size_t> pinned_; ///< base address -> bytes
};

} // namespace torch_uvm
