// Reports allocations and frees to the PyTorch profiler, as PyTorch's own allocators do.
#pragma once

#include <cstdint>

#include "allocator/caching/caching_managed_allocator.h"

namespace torch_uvm {

/// Call only if c10::memoryProfilingEnabled().
/// \param memory the allocator whose totals are reported
/// \param change in bytes; negative for a free
void report_to_profiler(const CachingManagedAllocator& memory, void* ptr, std::int64_t change, Location home);

} // namespace torch_uvm
