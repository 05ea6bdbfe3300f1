#include "allocator/adaptors/adaptors.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "runtime/bytes.h"
#include "runtime/error.h"

namespace torch_uvm {

Adaptor::Adaptor(std::shared_ptr<Allocator> upstream, AdaptorOptions options)
    : upstream_(required(std::move(upstream), "an adaptor")),
      options_(std::move(options)),
      log_(options_.log.empty() ? nullptr : std::make_unique<AllocationLog>(options_.log)) {}

Allocation Adaptor::allocate(std::size_t bytes, Location home, Stream stream) {
  while (true) {
    std::exception_ptr refusal;
    try {
      return forward(bytes, home, stream);
    } catch (const OutOfMemory&) {
      refusal = std::current_exception();
    }
    // Outside the handler, because it may throw and may take long.
    if (!options_.callback || !options_.callback(bytes, home)) {
      std::rethrow_exception(refusal);
    }
  }
}

Allocation Adaptor::forward(std::size_t bytes, Location home, Stream stream) {
  std::size_t claimed = 0;
  try {
    {
      const std::lock_guard lock(mutex_);
      if (options_.limit && bytes > *options_.limit - claimed_) {
        throw OutOfMemory(OutOfMemory::Cause::kLimit, bytes,
                          format_bytes(bytes) + " requested from " + description() + ", which has " +
                              format_bytes(claimed_) + " in use");
      }
      claimed_ += claimed = bytes;
    }
    Allocation allocation = upstream_->allocate(bytes, home, stream);
    if (allocation) {
      allocation.stream = stream;
      if (log_) {
        log_->allocated(allocation.ptr, bytes, stream);
      }
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
    if (log_) {
      log_->refused(bytes, stream);
    }
    const std::lock_guard lock(mutex_);
    claimed_ -= claimed;
    ++passed_.failures;
    throw;
  }
}

void Adaptor::free(const Allocation& allocation) noexcept {
  if (allocation && log_) {
    log_->freed(allocation.ptr, allocation.bytes, allocation.stream);
  }
  upstream_->free(allocation); // before the count is lowered, so that bytes counted as free are available
  if (allocation) {
    const std::lock_guard lock(mutex_);
    claimed_ -= allocation.bytes;
    --passed_.allocations;
    passed_.bytes -= static_cast<std::int64_t>(allocation.bytes);
  }
}

AllocatorFigures Adaptor::figures() const {
  AllocatorFigures figures = upstream_->figures();
  const PassedThrough now = passed();
  figures.allocations = now.allocations;
  figures.requested_bytes = now.bytes;
  figures.peak_requested_bytes = now.peak_bytes;
  return figures;
}

std::string Adaptor::description() const {
  const char* const kind = options_.limit      ? "limit("
                           : options_.callback ? "failure_callback("
                           : log_              ? "log("
                                               : "statistics(";
  return kind + upstream_->description() + (options_.limit ? ", " + format_bytes(*options_.limit) : "") + ")";
}

PassedThrough Adaptor::passed() const {
  const std::lock_guard lock(mutex_);
  return passed_;
}

void Adaptor::reset_peaks() {
  const std::lock_guard lock(mutex_);
  passed_.peak_allocations = passed_.allocations;
  passed_.peak_bytes = passed_.bytes;
}

AllocationLogEnd Adaptor::close_log() noexcept {
  return log_ ? log_->close() : AllocationLogEnd();
}

} // namespace torch_uvm
