// A caching allocator as one among other allocators: the process's own, or one with segments from an upstream.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>

#include "allocator/allocator.h"
#include "allocator/caching/caching_managed_allocator.h"

namespace torch_uvm {

class CachingAllocator final : public Allocator {
 public:
  /// \param memory is not owned, and outlives this
  explicit CachingAllocator(CachingManagedAllocator& memory) : memory_(memory) {}
  /// One of its own, whose segments come from `upstream`.
  /// \param least_shared_segment bytes: medium and large requests share segments of at least that many; 0: they do not
  /// \throws InvalidArgument where there is no upstream
  CachingAllocator(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, AllocatorOptions options = {},
                   std::size_t least_shared_segment = 0);

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  std::size_t release() override;
  AllocatorFigures figures() const override;
  std::string description() const override;

  CachingManagedAllocator& memory() {
    return memory_;
  }

 private:
  const std::shared_ptr<Allocator> upstream_; // outlives what is below
  std::unique_ptr<CachingManagedAllocator> own_;
  CachingManagedAllocator& memory_;
};

} // namespace torch_uvm
