// Sources of segments for a caching allocator.
#pragma once

#include <cstddef>
#include <mutex>
#include <optional>

#include "runtime/bytes.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// A source of segments. Thread-safe. Segments are aligned to 512 bytes; segments of at least 2 MiB are aligned to 2
/// MiB, except pinned ones. `allocate` throws OutOfMemory if memory is refused and RuntimeFailure for any other error.
/// `free` does not throw, and waits for device work that may still touch the segment.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  virtual void* allocate(std::size_t bytes, Location home) = 0;
  /// \param bytes as for `allocate`
  virtual void free(void* ptr, std::size_t bytes) noexcept = 0;
  /// Whether pages of a segment can migrate, so that prefetching them makes sense.
  virtual bool is_managed() const {
    return false;
  }
  /// Whether it has segments for that home.
  virtual bool serves(Location home) const {
    return is_managed() || !home.is_host();
  }
  /// Minimum size of a segment shared by medium and large requests, for sources where making a segment is slow. 0: no
  /// minimum.
  virtual std::size_t least_shared_segment() const {
    return 0;
  }
};

/// Segments of managed memory: accessible from the host and all devices, counted against the runtime's limit.
class ManagedSegmentSource final : public SegmentSource {
 public:
  explicit ManagedSegmentSource(ManagedRuntime& runtime) : runtime_(runtime) {}
  void* allocate(std::size_t bytes, Location home) override {
    return runtime_.allocate_managed(bytes, home);
  }
  void free(void* ptr, std::size_t /*bytes*/) noexcept override {
    runtime_.free_managed(ptr);
  }
  bool is_managed() const override {
    return true;
  }

 private:
  ManagedRuntime& runtime_;
};

/// Segments of plain device memory, as in PyTorch's native allocator. Homes are devices only.
class DeviceSegmentSource final : public SegmentSource {
 public:
  explicit DeviceSegmentSource(ManagedRuntime& runtime) : runtime_(runtime) {}
  void* allocate(std::size_t bytes, Location home) override {
    return runtime_.allocate_device(bytes, home.index);
  }
  void free(void* ptr, std::size_t /*bytes*/) noexcept override {
    runtime_.free_device(ptr);
  }

 private:
  ManagedRuntime& runtime_;
};

/// Segments of pinned host memory, with a limit of their own. The home is the host only.
class PinnedSegmentSource final : public SegmentSource {
 public:
  explicit PinnedSegmentSource(ManagedRuntime& runtime, std::optional<std::size_t> limit = std::nullopt)
      : runtime_(runtime), limit_(limit) {}
  void* allocate(std::size_t bytes, Location /*home*/) override {
    {
      const std::lock_guard lock(mutex_);
      if (limit_ && (bytes > *limit_ || bytes_ > *limit_ - bytes)) {
        throw OutOfMemory(OutOfMemory::Cause::kLimit, bytes,
                          "The limit of pinned host memory is " + format_bytes(*limit_) + ", of which " +
                              format_bytes(bytes_) + " are in use; " + format_bytes(bytes) + " were asked for");
      }
      bytes_ += bytes; // counted before the runtime call, so that two threads cannot both take the last bytes
    }
    try {
      return runtime_.allocate_pinned(bytes);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      bytes_ -= bytes;
      throw;
    }
  }
  void free(void* ptr, std::size_t bytes) noexcept override {
    runtime_.free_pinned(ptr);
    const std::lock_guard lock(mutex_);
    bytes_ -= bytes;
  }
  bool serves(Location home) const override {
    return home.is_host();
  }
  std::size_t least_shared_segment() const override {
    return 64 * MiB; // pinning runs at a few GB/s and blocks all other driver calls
  }

  /// Limits the bytes pinned at any time; nullopt removes the limit. Memory already pinned above a new limit stays.
  void set_limit(std::optional<std::size_t> bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
  }
  std::optional<std::size_t> limit() const {
    const std::lock_guard lock(mutex_);
    return limit_;
  }
  /// Currently pinned.
  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  ManagedRuntime& runtime_;
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  std::optional<std::size_t> limit_;
  std::size_t bytes_ = 0; ///< includes bytes currently being requested from the runtime
};

} // namespace torch_uvm
