#include "allocator/adaptors/upstream_segments.h"

#include <cstdint>

#include "allocator/size_classes.h"

namespace torch_uvm {
namespace {

/// The alignment that a source guarantees for segments of this size.
std::size_t alignment_of(std::size_t bytes) {
  return bytes >= kLargeGranularity ? kLargeGranularity : kBlockAlignment;
}

bool is_aligned(const void* ptr, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(ptr) % alignment == 0;
}

} // namespace

UpstreamSegmentSource::~UpstreamSegmentSource() {
  wait_for_devices(); // if this fails, the device has failed and no work is running
  for (const Allocation& allocation : freed_) {
    upstream_->free(allocation);
  }
}

void* UpstreamSegmentSource::allocate(std::size_t bytes, Location home) {
  release_freed();
  const std::size_t alignment = alignment_of(bytes);
  Allocation allocation = upstream_->allocate(bytes, home, Stream::host());
  if (!is_aligned(allocation.ptr, alignment)) {
    upstream_->free(allocation); // retry with enough extra bytes to align the start
    allocation = upstream_->allocate(bytes + alignment - kAllocationAlignment, home, Stream::host());
  }
  void* const ptr = reinterpret_cast<void*>(round_up(reinterpret_cast<std::uintptr_t>(allocation.ptr), alignment));
  try {
    Taken taken{allocation};
    const std::lock_guard lock(mutex_);
    at_.emplace(ptr, taken.begin());
    taken_.splice(taken_.end(), taken);
  } catch (...) {
    upstream_->free(allocation);
    throw;
  }
  return ptr;
}

void UpstreamSegmentSource::free(void* ptr) noexcept {
  {
    const std::lock_guard lock(mutex_);
    const auto found = at_.find(ptr);
    freed_.splice(freed_.end(), taken_, found->second);
    at_.erase(found);
  }
  release_freed();
}

void UpstreamSegmentSource::release_freed() noexcept {
  Taken freed; // only segments freed before the wait
  {
    const std::lock_guard lock(mutex_);
    freed.swap(freed_);
  }
  if (freed.empty()) {
    return;
  }
  if (!wait_for_devices()) {
    const std::lock_guard lock(mutex_);
    freed_.splice(freed_.end(), freed);
    return;
  }
  for (const Allocation& allocation : freed) {
    upstream_->free(allocation);
  }
}

bool UpstreamSegmentSource::wait_for_devices() noexcept {
  try {
    for (int device = 0; device < runtime_.device_count(); ++device) {
      runtime_.synchronize_device(device);
    }
    return true;
  } catch (...) {
    return false;
  }
}

} // namespace torch_uvm
