#include "allocator/replay/logging_allocator.h"

#include <new>

namespace torch_uvm {
namespace {

constexpr Stream kUsual = Stream::default_of(0);

} // namespace

LoggingAllocator::LoggingAllocator(std::shared_ptr<Allocator> upstream, std::shared_ptr<AllocationLog> log)
    : Adaptor(std::move(upstream)), log_(std::move(log)) {
  if (log_ == nullptr) {
    throw InvalidArgument("an allocator that logs, and no log");
  }
}

Allocation LoggingAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  Allocation allocation;
  try {
    allocation = upstream().allocate(bytes, home, stream);
  } catch (...) {
    log_->refused(bytes, stream);
    throw;
  }
  if (allocation) {
    if (stream != kUsual) {
      try {
        const std::lock_guard lock(mutex_);
        streams_.insert_or_assign(allocation.ptr, stream);
      } catch (const std::bad_alloc&) {
        // Logging must not make an allocation fail. The free is then logged on the default stream.
      }
    }
    log_->allocated(allocation.ptr, bytes, stream);
  }
  return allocation;
}

void LoggingAllocator::free(const Allocation& allocation) noexcept {
  if (allocation) {
    Stream stream = kUsual;
    {
      const std::lock_guard lock(mutex_);
      if (const auto known = streams_.find(allocation.ptr); known != streams_.end()) {
        stream = known->second;
        streams_.erase(known);
      }
    }
    log_->freed(allocation.ptr, allocation.bytes, stream);
  }
  upstream().free(allocation);
}

std::string LoggingAllocator::description() const {
  return "log(" + upstream().description() + ")";
}

} // namespace torch_uvm
