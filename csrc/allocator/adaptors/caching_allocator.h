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

/// A pool, if it has initial bytes or a maximum.
struct CachingOptions {
  Location home; ///< of the initial reservation
  std::size_t initial = 0; ///< bytes reserved at construction
  std::optional<std::size_t> maximum = std::nullopt; ///< bytes of its segments at any time
  AllocatorOptions cache = {};
};

class CachingAllocator : public Allocator {
 public:
  /// \param memory not owned; must outlive this
  explicit CachingAllocator(CachingManagedAllocator& memory) : description_("caching"), memory_(memory) {}
  /// Makes a caching allocator whose segments come from `upstream`. The upstream orders its memory by one stream, but a
  /// segment may be used on any: it is allocated for the host, and freed once every device has finished its work.
  /// \throws InvalidArgument if upstream is null or initial exceeds maximum; OutOfMemory
  CachingAllocator(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const CachingOptions& options = {});

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  std::size_t release() override;
  bool serves(Location home) const override {
    return upstream_ == nullptr || upstream_->serves(home);
  }
  AllocatorFigures figures() const override;
  std::string description() const override {
    return description_;
  }

 private:
  std::string description_;
  std::shared_ptr<Allocator> upstream_; // declared before `own_`, so that it outlives it
  std::unique_ptr<CachingManagedAllocator> own_;
  CachingManagedAllocator& memory_;
};

} // namespace torch_uvm
