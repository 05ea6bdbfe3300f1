#include "allocator/upstream_segments.h"

#include <cstdint>

#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// What a source promises for segments of that many bytes.
std::size_t alignment_of(std::size_t bytes) {
  return bytes >= kLargeGranularity ? kLargeGranularity : kBlockAlignment;
}

bool is_aligned(const void* ptr, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(ptr) % alignment == 0;
}

} // namespace

void* UpstreamSegmentSource::allocate(std::size_t bytes, Location home) {
  const Stream stream = home.is_host() ? Stream::host() : Stream::default_of(home.index);
  const std::size_t alignment = alignment_of(bytes);
  Allocation taken = upstream_->allocate(bytes, home, stream);
  if (!is_aligned(taken.ptr, alignment)) {
    upstream_->free(taken); // it was by chance before: now there is as much more as that takes
    taken = upstream_->allocate(bytes + alignment - kAllocationAlignment, home, stream);
  }
  try {
    if (!home.is_host()) {
      runtime_.synchronize_stream(stream);
    }
    const std::uintptr_t address = round_up(reinterpret_cast<std::uintptr_t>(taken.ptr), alignment);
    void* const ptr = reinterpret_cast<void*>(address);
    const std::lock_guard lock(mutex_);
    taken_.emplace(ptr, Taken{taken, home});
    return ptr;
  } catch (...) {
    upstream_->free(taken);
    throw;
  }
}

void UpstreamSegmentSource::free(void* ptr) noexcept {
  Taken taken;
  {
    const std::lock_guard lock(mutex_);
    const auto found = taken_.find(ptr);
    taken = found->second;
    taken_.erase(found);
  }
  try {
    if (!taken.home.is_host()) {
      runtime_.synchronize_device(taken.home.index);
    }
  } catch (...) {
    return; // the device has failed: what it may still touch is leaked
  }
  upstream_->free(taken.allocation);
}

} // namespace torch_uvm
