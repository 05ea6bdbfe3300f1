#include "allocator/adaptors/counting_allocator.h"

#include <algorithm>

namespace torch_uvm {

Allocation CountingAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  try {
    const Allocation allocation = upstream().allocate(bytes, home, stream);
    if (allocation) {
      const std::lock_guard lock(mutex_);
      ++passed_.allocations;
      ++passed_.total_allocations;
      passed_.bytes += static_cast<std::int64_t>(bytes);
      passed_.total_bytes += static_cast<std::int64_t>(bytes);
      passed_.peak_allocations = std::max(passed_.peak_allocations, passed_.allocations);
      passed_.peak_bytes = std::max(passed_.peak_bytes, passed_.bytes);
    }
    return allocation;
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ++passed_.failures;
    throw;
  }
}

void CountingAllocator::free(const Allocation& allocation) noexcept {
  upstream().free(allocation);
  if (allocation) {
    const std::lock_guard lock(mutex_);
    --passed_.allocations;
    passed_.bytes -= static_cast<std::int64_t>(allocation.bytes);
  }
}

AllocatorFigures CountingAllocator::figures() const {
  AllocatorFigures figures = upstream().figures();
  const PassedThrough now = passed();
  figures.allocations = now.allocations;
  figures.requested_bytes = now.bytes;
  figures.peak_requested_bytes = now.peak_bytes;
  return figures;
}

std::string CountingAllocator::description() const {
  return "statistics(" + upstream().description() + ")";
}

PassedThrough CountingAllocator::passed() const {
  const std::lock_guard lock(mutex_);
  return passed_;
}

void CountingAllocator::reset_peaks() {
  const std::lock_guard lock(mutex_);
  passed_.peak_allocations = passed_.allocations;
  passed_.peak_bytes = passed_.bytes;
}

} // namespace torch_uvm
