#include "allocator/segment_source.h"

namespace torch_uvm {

void* PinnedSegmentSource::allocate(std::size_t bytes, Location /*home*/) {
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

void PinnedSegmentSource::free(void* ptr, std::size_t bytes) noexcept {
  runtime_.free_pinned(ptr);
  const std::lock_guard lock(mutex_);
  bytes_ -= bytes;
}

void PinnedSegmentSource::set_limit(std::optional<std::size_t> bytes) {
  const std::lock_guard lock(mutex_);
  limit_ = bytes;
}

std::optional<std::size_t> PinnedSegmentSource::limit() const {
  const std::lock_guard lock(mutex_);
  return limit_;
}

std::size_t PinnedSegmentSource::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

} // namespace torch_uvm
