// The runtime itself as an allocator: what others stand on, or are compared with.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>

#include "allocator/allocator.h"

namespace torch_uvm {

/// Each allocation is one of the runtime's, of managed memory and under its limit; each free gives it back at once,
/// after the work that may touch it. Keeps nothing.
class RuntimeAllocator final : public Allocator {
 public:
  /// \param runtime is not owned, and outlives this
  explicit RuntimeAllocator(ManagedRuntime& runtime) : runtime_(runtime) {}

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override; ///< waited for anyway
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
