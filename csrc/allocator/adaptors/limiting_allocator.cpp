#include "allocator/adaptors/limiting_allocator.h"

#include "runtime/bytes.h"

namespace torch_uvm {

Allocation LimitingAllocator::allocate(std::size_t bytes, Location home, Stream stream) {
  std::size_t used = used_.load(std::memory_order_relaxed);
  do {
    if (bytes > limit_ - used) {
      throw OutOfMemory(OutOfMemory::Cause::kLimit, bytes,
                        format_bytes(bytes) + " asked for, with " + format_bytes(used) + " of the " +
                            format_bytes(limit_) + " in use that " + description() + " may give out");
    }
  } while (!used_.compare_exchange_weak(used, used + bytes, std::memory_order_relaxed));
  try {
    return upstream().allocate(bytes, home, stream);
  } catch (...) {
    used_.fetch_sub(bytes, std::memory_order_relaxed);
    throw;
  }
}

void LimitingAllocator::free(const Allocation& allocation) noexcept {
  upstream().free(allocation); // before the count is lowered, so that bytes counted as free are available
  used_.fetch_sub(allocation.bytes, std::memory_order_relaxed);
}

std::string LimitingAllocator::description() const {
  return "limit(" + upstream().description() + ", " + format_bytes(limit_) + ")";
}

} // namespace torch_uvm
