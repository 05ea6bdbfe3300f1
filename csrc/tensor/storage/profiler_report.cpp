#include "tensor/storage/profiler_report.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/Allocator.h>

namespace torch_uvm {

void report_to_profiler(const CachingManagedAllocator& memory, void* ptr, std::int64_t change, Location home) {
  const Statistics now = memory.statistics(home);
  const c10::Device device = home.is_host() ? c10::Device(c10::DeviceType::CPU)
                                            : c10::Device(at::getAccelerator(/*checked=*/true).value(),
                                                          static_cast<c10::DeviceIndex>(home.index));
  c10::reportMemoryUsageToProfiler(ptr, change, static_cast<std::size_t>(now.allocated_bytes[0].current),
                                   static_cast<std::size_t>(now.reserved_bytes[0].current), device);
}

} // namespace torch_uvm
