#include "allocator/adaptors/retrying_allocator.h"

#include <exception>

namespace torch_uvm {

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

std::string RetryingAllocator::description() const {
  return "failure_callback(" + upstream().description() + ")";
}

} // namespace torch_uvm
