// The runtime as an allocator: the lowest upstream, and a baseline for comparison.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>

#include "allocator/allocator.h"

namespace torch_uvm {

/// Each allocation is a runtime allocation of managed memory, counted against the runtime's limit. Each free waits for
/// the work that may touch the memory and releases it immediately. Caches nothing.
class RuntimeAllocator final : public Allocator {
 public:
  /// \param runtime not owned; must outlive this
  explicit RuntimeAllocator(ManagedRuntime& runtime) : runtime_(runtime) {}

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  /// Only validates: free waits for all work anyway.
  void record_stream(const Allocation& allocation, Stream stream) override;
  std::size_t release() override {
    return 0;
  }
  AllocatorFigures figures() const override;
  std::string description() const override {
    return "runtime";
  }

 private:
  void check(Stream stream) const; ///< \throws InvalidArgument

  ManagedRuntime& runtime_;
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  AllocatorFigures figures_;
};

} // namespace torch_uvm
