// Adapts CachingManagedAllocator to the Allocator interface: the process's instance, or a new one with segments from an
// upstream.
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
  /// \param memory not owned; must outlive this
  explicit CachingAllocator(CachingManagedAllocator& memory) : memory_(memory) {}
  /// Makes a caching allocator whose segments come from `upstream`.
  /// \param least_shared_segment minimum bytes of a segment shared by medium and large requests; 0: no minimum
  /// \throws InvalidArgument if upstream is null
  CachingAllocator(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, AllocatorOptions options = {},
                   std::size_t least_shared_segment = 0);

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  std::size_t release() override;
  bool serves(Location home) const override {
    return upstream_ == nullptr || upstream_->serves(home);
  }
  AllocatorFigures figures() const override;
  std::string description() const override;

 private:
  const std::shared_ptr<Allocator> upstream_; // declared first, so that it outlives the members below
  std::unique_ptr<CachingManagedAllocator> own_;
  CachingManagedAllocator& memory_;
};

} // namespace torch_uvm
