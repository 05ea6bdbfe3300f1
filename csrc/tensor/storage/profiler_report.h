// Tells the profiler of memory that came or went, as PyTorch's own allocators do.
#pragma once

#include <cstdint>

#include "allocator/caching/caching_managed_allocator.h"

namespace torch_uvm {

/// To be called only while c10::memoryProfilingEnabled().
/// \param memory whose totals go with it
/// \param change in bytes; less than 0 for memory that went
void report_to_profiler(const CachingManagedAllocator& memory, void* ptr, std::int64_t change, Location home);

} // namespace torch_uvm
