// Where a caching allocator gets its segments from.
#pragma once

#include <cstddef>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// A supplier of segments, aligned to 512 bytes at least (2 MiB for those that large). Thread-safe.
/// `allocate` throws OutOfMemory where memory is refused, RuntimeFailure for all else that goes wrong;
/// `free` does not throw, and waits for device work that may still touch the segment.
class SegmentSource {
 public:
  virtual ~SegmentSource() = default;
  virtual void* allocate(std::size_t bytes, Location home) = 0;
  virtual void free(void* ptr) noexcept = 0;
  /// Whether pages of a segment can move, so that hints about them make sense.
  virtual bool is_managed() const = 0;
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

} // namespace torch_uvm
