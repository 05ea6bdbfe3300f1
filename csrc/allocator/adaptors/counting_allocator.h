// Counts the allocations made through it. Other users of its upstream are not counted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "allocator/adaptors/adaptor.h"

namespace torch_uvm {

/// Counts of one counting allocator. Bytes are as requested.
struct PassedThrough {
  std::int64_t allocations = 0; ///< live
  std::int64_t peak_allocations = 0;
  std::int64_t total_allocations = 0; ///< since construction
  std::int64_t bytes = 0;
  std::int64_t peak_bytes = 0;
  std::int64_t total_bytes = 0;
  std::int64_t failures = 0; ///< requests that threw
};

class CountingAllocator final : public Adaptor {
 public:
  explicit CountingAllocator(std::shared_ptr<Allocator> upstream) : Adaptor(std::move(upstream)) {}

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  /// The upstream's figures, except that the allocations and their bytes are those counted here.
  AllocatorFigures figures() const override;
  std::string description() const override;

  PassedThrough passed() const;
  void reset_peaks(); ///< to the current values

 private:
  mutable std::mutex mutex_; // leaf: nothing is called with it held
  PassedThrough passed_;
};

} // namespace torch_uvm
