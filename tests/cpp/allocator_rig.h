// The rig of the allocator's tests: an allocator on a runtime, destroyed without leaks at the end of each case.
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

/// Allows every block to be moved.
inline bool agree(void* /*tag*/) {
  return true;
}

/// Options that give each large request a segment of its own, so that a case knows the layout.
inline AllocatorOptions apart() {
  AllocatorOptions options;
  options.segment_min_bytes = std::nullopt;
  return options;
}

/// An allocator and its runtime. The destructor destroys both.
struct Rig {
  std::unique_ptr<ManagedRuntime> runtime; ///< with two devices
  std::unique_ptr<CachingManagedAllocator> allocator;
  bool managed = true;
  std::vector<Stream> streams; ///< created by `stream`, destroyed with the rig

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
  /// Leaves room for exactly `bytes`: sets the limit of managed memory, or fills the memory of the first device.
  /// \return the block that fills the device, or nullptr
  Block* leave_room(std::size_t bytes) {
    if (managed) {
      runtime->set_limit(bytes);
      return nullptr;
    }
    return allocate(runtime->memory_info(0).free - bytes);
  }
};

/// Makes a case's rig, on the runtime and source of segments for which the suite is registered.
using MakeRig = std::function<Rig()>;

} // namespace contract
