#include "allocator/adaptors/pool_allocator.h"

#include "allocator/adaptors/limiting_allocator.h"
#include "allocator/size_classes.h"
#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {

PoolAllocator::PoolAllocator(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const PoolOptions& options)
    : options_(options), upstream_(upstream) {
  if (options.maximum) {
    if (options.initial > *options.maximum) {
      throw InvalidArgument("a pool that begins with " + format_bytes(options.initial) + " and may have " +
                            format_bytes(*options.maximum));
    }
    upstream = std::make_shared<LimitingAllocator>(std::move(upstream), *options.maximum);
  }
  cache_ = std::make_unique<CachingAllocator>(runtime, std::move(upstream), options.cache, kMediumSegment);
  const Stream stream = options.home.is_host() ? Stream::host() : Stream::default_of(options.home.index);
  cache_->free(cache_->allocate(options.initial, options.home, stream)); // the freed block stays cached
}

std::string PoolAllocator::description() const {
  const std::string most = options_.maximum ? ", at most " + format_bytes(*options_.maximum) : "";
  return "pool(" + upstream_->description() + ", " + format_bytes(options_.initial) + most + ")";
}

} // namespace torch_uvm
