#include "allocator/segment_source.h"

#include <utility>

namespace torch_uvm {

void* PinnedSegmentSource::allocate(std::size_t bytes, Location /*home*/) {
  std::map<void*, std::size_t> scratch;
  scratch.emplace(nullptr, bytes);
  auto node = scratch.extract(scratch.begin()); // allocated before the runtime is called, so that inserting cannot fail
  {
    const std::lock_guard lock(mutex_);
    if (limit_ && (bytes > *limit_ || bytes_ > *limit_ - bytes)) {
      throw OutOfMemory(OutOfMemory::Cause::kLimit, bytes,
                        "The limit of pinned host memory is " + format_bytes(*limit_) + ", of which " +
                            format_bytes(bytes_) + " are in use; " + format_bytes(bytes) + " were asked for");
    }
    bytes_ += bytes; // counted before the runtime call, so that two threads cannot both take the last bytes
  }
  void* ptr = nullptr;
  try {
    ptr = runtime_.allocate_pinned(bytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    bytes_ -= bytes;
    throw;
  }
  const std::lock_guard lock(mutex_);
  node.key() = ptr;
  pinned_.insert(std::move(node));
  return ptr;
}

void PinnedSegmentSource::free(void* ptr) noexcept {
  std::size_t bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pinned_.find(ptr);
    if (found != pinned_.end()) {
      bytes = found->second;
      pinned_.erase(found); // before the runtime may reuse the address
    }
  }
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
