#include "allocator/adaptors/caching_allocator.h"

#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "allocator/adaptors/adaptors.h"
#include "allocator/size_classes.h"
#include "runtime/error.h"

namespace torch_uvm {
namespace {

/// Segments from an upstream.
class UpstreamSegments final : public SegmentSource {
 public:
  UpstreamSegments(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, std::size_t least_shared)
      : runtime_(runtime), upstream_(std::move(upstream)), least_shared_(least_shared) {}

  void* allocate(std::size_t bytes, Location home) override {
    const std::size_t alignment = bytes >= kLargeGranularity ? kLargeGranularity : kBlockAlignment;
    const auto misaligned = [=](const void* ptr) { return reinterpret_cast<std::uintptr_t>(ptr) % alignment; };
    Allocation made = upstream_->allocate(bytes, home, Stream::host());
    if (misaligned(made.ptr) != 0) {
      upstream_->free(made); // retry with enough extra bytes to align the start
      made = upstream_->allocate(bytes + alignment - kAllocationAlignment, home, Stream::host());
    }
    const std::size_t skip = misaligned(made.ptr) == 0 ? 0 : alignment - misaligned(made.ptr);
    void* const ptr = static_cast<char*>(made.ptr) + skip;
    try {
      const std::lock_guard lock(mutex_);
      in_use_.emplace(ptr, made);
    } catch (...) {
      upstream_->free(made);
      throw;
    }
    return ptr;
  }

  void free(void* ptr, std::size_t /*bytes*/) noexcept override {
    for (int device = 0; device < runtime_.device_count(); ++device) {
      try {
        runtime_.synchronize_device(device);
      } catch (...) {
        // The device has failed, so no work is running there any more.
      }
    }
    Allocation freed;
    {
      const std::lock_guard lock(mutex_);
      freed = in_use_.extract(ptr).mapped();
    }
    upstream_->free(freed);
  }

  bool is_managed() const override {
    return true;
  }
  std::size_t least_shared_segment() const override {
    return least_shared_;
  }

 private:
  ManagedRuntime& runtime_;
  const std::shared_ptr<Allocator> upstream_;
  const std::size_t least_shared_;
  std::mutex mutex_; // leaf: nothing is called with it held
  std::unordered_map<void*, Allocation> in_use_; ///< by aligned address
};

bool is_pool(const CachingOptions& options) {
  return options.initial != 0 || options.maximum;
}

/// The upstream, bounded by the maximum.
std::shared_ptr<Allocator> bounded(std::shared_ptr<Allocator> upstream, const CachingOptions& options) {
  if (options.maximum.value_or(options.initial) < options.initial) {
    throw InvalidArgument("a pool that begins with " + format_bytes(options.initial) + " and may have " +
                          format_bytes(*options.maximum));
  }
  return options.maximum ? std::make_shared<Adaptor>(std::move(upstream), AdaptorOptions{.limit = options.maximum})
                         : upstream;
}

} // namespace

CachingAllocator::CachingAllocator(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream,
                                   const CachingOptions& options)
    : upstream_(required(std::move(upstream), "an allocator")),
      own_(std::make_unique<CachingManagedAllocator>(
          runtime,
          std::make_unique<UpstreamSegments>(runtime, bounded(upstream_, options),
                                             is_pool(options) ? kMediumSegment : 0),
          options.cache)),
      memory_(*own_) {
  description_ = (is_pool(options) ? "pool(" : "caching(") + upstream_->description() +
                 (is_pool(options) ? ", " + format_bytes(options.initial) : "") +
                 (options.maximum ? ", at most " + format_bytes(*options.maximum) : "") + ")";
  const Stream stream = options.home.is_host() ? Stream::host() : Stream::default_of(options.home.index);
  memory_.free(memory_.allocate(options.initial, options.home, stream)); // the freed block stays cached
}

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

} // namespace torch_uvm
