// What the allocator's tests stand on: an allocator on a runtime, gone without a trace when a case is over.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "harness.h"
#include "runtime/bytes.h"
#include "runtime/managed_runtime.h"

namespace contract {

using namespace torch_uvm;

constexpr Location kDevice = Location::device(0);
constexpr Stream kStream = Stream::default_of(0);

/// Every owner of a block lets it be moved.
inline bool agree(void* /*tag*/) {
  return true;
}

/// Large requests have segments of their own, so that a case can say what lies where.
inline AllocatorOptions apart() {
  AllocatorOptions options;
  options.segment_min_bytes = std::nullopt;
  return options;
}

/// An allocator, what it stands on, and what is left of both when the case is over: nothing.
struct Rig {
  std::unique_ptr<ManagedRuntime> runtime; ///< of two devices
  std::unique_ptr<CachingManagedAllocator> allocator;
  bool managed = true;
  std::vector<Stream> streams; ///< made by `stream`, destroyed with the rig

  Rig(std::unique_ptr<ManagedRuntime> made, bool managed, AllocatorOptions options = apart())
      : runtime(std::move(made)), managed(managed) {
    std::unique_ptr<SegmentSource> source;
    if (managed) {
      source = std::make_unique<ManagedSegmentSource>(*runtime);
    } else {
      source = std::make_unique<DeviceSegmentSource>(*runtime);
    }
    allocator = std::make_unique<CachingManagedAllocator>(*runtime, std::move(source), options);
  }
  Rig(Rig&&) = default;
  ~Rig() {
    allocator.reset();
    for (const Stream stream : streams) {
      runtime->destroy_stream(stream);
    }
  }

  Stream stream(int device = 0) {
    streams.push_back(runtime->create_stream(device, 0));
    return streams.back();
  }
  Block* allocate(std::size_t bytes, Stream stream = kStream) {
    return allocator->allocate(bytes, Location::device(stream.device), stream);
  }
  std::uintptr_t address(const Block* block) const {
    return reinterpret_cast<std::uintptr_t>(allocator->data(block));
  }
  std::int64_t reserved() const {
    return allocator->statistics().reserved_bytes[0].current;
  }
  void check() const {
    if (const auto wrong = allocator->check()) {
      harness::fail(__FILE__, __LINE__, *wrong);
    }
  }
  /// Leaves a limit of managed bytes, or of what the first device has, that fits `bytes` and no more.
  /// \return the block that takes up the rest, or nullptr
  Block* leave_room(std::size_t bytes) {
    if (managed) {
      runtime->set_limit(bytes);
      return nullptr;
    }
    return allocate(runtime->memory_info(0).free - bytes);
  }
};

/// Makes the rig of a case, on the runtime and source of segments that the suite is registered for.
using MakeRig = std::function<Rig()>;

} // namespace contract
