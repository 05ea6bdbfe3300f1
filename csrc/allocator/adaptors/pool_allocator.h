// A pool: a cache of its own that takes some memory when it is made, and no more than it may.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "allocator/adaptors/caching_allocator.h"
#include "allocator/allocator.h"

namespace torch_uvm {

struct PoolOptions {
  Location home; ///< of what it takes when it is made
  std::size_t initial = 0; ///< bytes
  std::optional<std::size_t> maximum; ///< bytes of its segments at once; nullopt: what the upstream has
  AllocatorOptions cache; ///< how it caches
};

class PoolAllocator final : public Allocator {
 public:
  /// \throws InvalidArgument where it begins with more than its maximum; OutOfMemory
  PoolAllocator(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const PoolOptions& options);

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override {
    return cache_->allocate(bytes, home, stream);
  }
  void free(const Allocation& allocation) noexcept override {
    cache_->free(allocation);
  }
  void record_stream(const Allocation& allocation, Stream stream) override {
    cache_->record_stream(allocation, stream);
  }
  std::size_t release() override {
    return cache_->release();
  }
  AllocatorFigures figures() const override {
    return cache_->figures();
  }
  std::string description() const override;

 private:
  const PoolOptions options_;
  const std::shared_ptr<Allocator> upstream_;
  std::unique_ptr<CachingAllocator> cache_;
};

} // namespace torch_uvm
