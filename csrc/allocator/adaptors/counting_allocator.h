// Counts what passes through it, and nothing else that its upstream serves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "allocator/adaptors/adaptor.h"

namespace torch_uvm {

/// Of one counting allocator. Bytes are as asked for.
struct PassedThrough {
  std::int64_t allocations = 0; ///< in callers' hands
  std::int64_t peak_allocations = 0;
  std::int64_t total_allocations = 0; ///< since it was made
  std::int64_t bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_bytes = 0;
  std::int64_t failures = 0; ///< requests that raised
};

class CountingAllocator final : public Adaptor {
 public:
  explicit CountingAllocator(std::shared_ptr<Allocator> upstream) : Adaptor(std::move(upstream)) {}

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  /// The upstream's, but for allocations and their bytes, which are those that passed.
  AllocatorFigures figures() const override;
  std::string description() const override;

  PassedThrough passed() const;
  void reset_peaks(); ///< to what there is now

 private:
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  PassedThrough passed_;
};

} // namespace torch_uvm
