#include "allocator/adaptors/caching_allocator.h"

#include "allocator/adaptors/upstream_segments.h"
#include "runtime/error.h"

namespace torch_uvm {

CachingAllocator::CachingAllocator(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream,
                                   AllocatorOptions options, std::size_t least_shared_segment)
    : upstream_(required(std::move(upstream), "an allocator")),
      own_(std::make_unique<CachingManagedAllocator>(
          runtime, std::make_unique<UpstreamSegmentSource>(runtime, upstream_, least_shared_segment), options)),
      memory_(*own_) {}

Allocation CachingAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  Block* const block = memory_.allocate(bytes, home, stream);
  return {memory_.data(block), bytes, block};
}

void CachingAllocator::free(const Allocation& allocation) noexcept {
  memory_.free(static_cast<Block*>(allocation.handle));
}

void CachingAllocator::record_stream(const Allocation& allocation, Stream stream) {
  if (allocation.handle != nullptr) {
    memory_.record_stream(static_cast<Block*>(allocation.handle), stream);
  }
}

std::size_t CachingAllocator::release() {
  return memory_.empty_cache();
}

AllocatorFigures CachingAllocator::figures() const {
  const Statistics now = memory_.statistics();
  AllocatorFigures figures;
  figures.allocations = now.allocation[0].current;
  figures.requested_bytes = now.requested_bytes[0].current;
  figures.reserved_bytes = now.reserved_bytes[0].current;
  figures.peak_requested_bytes = now.requested_bytes[0].peak;
  figures.peak_reserved_bytes = now.reserved_bytes[0].peak;
  figures.upstream_allocations = now.num_device_alloc;
  figures.upstream_frees = now.num_device_free;
  figures.events_recorded = now.num_events_recorded;
  return figures;
}

std::string CachingAllocator::description() const {
  return upstream_ ? "caching(" + upstream_->description() + ")" : "caching";
}

} // namespace torch_uvm
