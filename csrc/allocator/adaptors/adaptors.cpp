#include "allocator/adaptors/adaptors.h"

#include <algorithm>
#include <exception>

#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {

Allocation CountingAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  {
    const std::lock_guard lock(mutex_);
    if (limit_ && bytes > *limit_ - claimed_) {
      ++passed_.failures;
      throw OutOfMemory(OutOfMemory::Cause::kLimit, bytes,
                        format_bytes(bytes) + " requested from " + description() + ", which has " +
                            format_bytes(claimed_) + " in use");
    }
    claimed_ += bytes;
  }
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
    claimed_ -= bytes;
    ++passed_.failures;
    throw;
  }
}

void CountingAllocator::free(const Allocation& allocation) noexcept {
  upstream().free(allocation); // before the count is lowered, so that bytes counted as free are available
  if (allocation) {
    const std::lock_guard lock(mutex_);
    claimed_ -= allocation.bytes;
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
  return limit_ ? "limit(" + upstream().description() + ", " + format_bytes(*limit_) + ")"
                : "statistics(" + upstream().description() + ")";
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

Allocation RetryingAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  while (true) {
    std::exception_ptr refusal;
    try {
      return upstream().allocate(bytes, home, stream);
    } catch (const OutOfMemory&) {
      refusal = std::current_exception();
    }
    if (!callback_(bytes, home)) { // outside the handler, because it may throw and may take long
      std::rethrow_exception(refusal);
    }
  }
}

} // namespace torch_uvm
