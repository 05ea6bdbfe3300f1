// A pool: a caching allocator of its own with an initial reservation and an optional maximum.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "allocator/adaptors/caching_allocator.h"
#include "allocator/allocator.h"

namespace torch_uvm {

struct PoolOptions {
  Location home; ///< of the initial reservation
  std::size_t initial = 0; ///< bytes reserved at construction
  /// Maximum bytes of its segments at any time; nullopt: no limit but the upstream's.
  std::optional<std::size_t> maximum;
  AllocatorOptions cache; ///< options of its caching allocator
};

class PoolAllocator final : public Allocator {
 public:
  /// \throws InvalidArgument if initial exceeds maximum; OutOfMemory
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
  bool serves(Location home) const override {
    return cache_->serves(home);
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
