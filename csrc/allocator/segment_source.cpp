#include "allocator/segment_source.h"

#include <utility>

#include "allocator/size_classes.h"

namespace torch_uvm {
namespace {

bool fits(const AddressRanges& ranges, int device) {
  const std::size_t granularity = ranges.granularity(device);
  return granularity != 0 && kLargeGranularity % granularity == 0;
}

/// nullptr unless the host and all devices have address ranges that segments fit into.
AddressRanges* ranges_of_all(ManagedRuntime& runtime) {
  AddressRanges* const ranges = runtime.address_ranges();
  for (int device = Location::host().index; ranges != nullptr && device < runtime.device_count(); ++device) {
    if (!fits(*ranges, device)) {
      return nullptr;
    }
  }
  return ranges;
}

} // namespace

void* SegmentSource::allocate_range(std::size_t bytes, Location home, Piece& piece) {
  void* const range = ranges()->reserve(bytes, home.index);
  Piece made;
  try {
    made = ranges()->allocate_piece(bytes, home.index);
    ranges()->map(range, made, home.index);
  } catch (...) {
    ranges()->free_piece(made);
    ranges()->release(range, bytes);
    throw;
  }
  piece = made;
  return range;
}

void SegmentSource::free_range(void* range, Piece piece) noexcept {
  ranges()->free_piece(piece);
  ranges()->release(range, piece.bytes);
}

AddressRanges* ManagedSegmentSource::ranges() const {
  return ranges_of_all(runtime_);
}

AddressRanges* PinnedSegmentSource::ranges() const {
  return ranges_of_all(runtime_);
}

void PinnedSegmentSource::claim(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  if (limit_ && (bytes > *limit_ || bytes_ > *limit_ - bytes)) {
    throw OutOfMemory(OutOfMemory::Cause::kLimit, bytes,
                      "The limit of pinned host memory is " + format_bytes(*limit_) + ", of which " +
                          format_bytes(bytes_) + " are in use; " + format_bytes(bytes) + " were asked for");
  }
  bytes_ += bytes; // counted before the runtime call, so that two threads cannot both take the last bytes
}

void PinnedSegmentSource::give_back(std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  bytes_ -= bytes;
}

void* PinnedSegmentSource::allocate(std::size_t bytes, Location /*home*/) {
  std::map<void*, std::size_t> scratch;
  scratch.emplace(nullptr, bytes);
  auto node = scratch.extract(scratch.begin()); // allocated before the runtime is called, so that inserting cannot fail
  claim(bytes);
  void* ptr = nullptr;
  try {
    ptr = runtime_.allocate_pinned(bytes);
  } catch (...) {
    give_back(bytes);
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
  give_back(bytes);
}

void* PinnedSegmentSource::allocate_range(std::size_t bytes, Location home, Piece& piece) {
  claim(bytes);
  try {
    return SegmentSource::allocate_range(bytes, home, piece);
  } catch (...) {
    give_back(bytes);
    throw;
  }
}

void PinnedSegmentSource::free_range(void* range, Piece piece) noexcept {
  SegmentSource::free_range(range, piece);
  give_back(piece.bytes);
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
