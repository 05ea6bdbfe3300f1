#include "allocator/adaptors/runtime_allocator.h"

#include <algorithm>
#include <cstdint>

#include "runtime/error.h"

namespace torch_uvm {

Allocation RuntimeAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  check(stream);
  if (bytes == 0) {
    return {};
  }
  void* const ptr = runtime_.allocate_managed(bytes, home);
  const std::lock_guard lock(mutex_);
  ++figures_.allocations;
  ++figures_.upstream_allocations;
  figures_.requested_bytes += static_cast<std::int64_t>(bytes);
  figures_.peak_requested_bytes = std::max(figures_.peak_requested_bytes, figures_.requested_bytes);
  return {ptr, bytes, nullptr};
}

void RuntimeAllocator::free(const Allocation& allocation) noexcept {
  if (!allocation) {
    return;
  }
  runtime_.free_managed(allocation.ptr);
  const std::lock_guard lock(mutex_);
  --figures_.allocations;
  ++figures_.upstream_frees;
  figures_.requested_bytes -= static_cast<std::int64_t>(allocation.bytes);
}

void RuntimeAllocator::record_stream(const Allocation& /*allocation*/, Stream stream) {
  check(stream);
}

AllocatorFigures RuntimeAllocator::figures() const {
  const std::lock_guard lock(mutex_);
  AllocatorFigures now = figures_;
  now.reserved_bytes = now.requested_bytes;
  now.peak_reserved_bytes = now.peak_requested_bytes;
  return now;
}

void RuntimeAllocator::check(Stream stream) const {
  if (stream.device >= runtime_.device_count() || stream.device < -1) {
    throw InvalidArgument("a stream of device " + std::to_string(stream.device) + "; there are " +
                          std::to_string(runtime_.device_count()) + " devices");
  }
}

} // namespace torch_uvm
