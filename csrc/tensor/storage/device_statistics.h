// A device's statistics as PyTorch reads them: those of its plain memory plus those of its managed memory.
//
// The two peaks may be of different times, so a sum of peaks is an upper bound. It is exact for a program that uses
// only one kind of memory since the peaks were reset.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstddef>

#include "allocator/statistics.h"

namespace torch_uvm {

inline void add(c10::CachingDeviceAllocator::DeviceStats& to, const Statistics& from) {
  const auto add_array = [](c10::CachingAllocator::StatArray& sum, const StatArray& added) {
    // The pool kinds are c10's, in the same order.
    static_assert(kPoolKinds == static_cast<std::size_t>(c10::CachingAllocator::StatType::NUM_TYPES));
    for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
      sum[kind].current += added[kind].current;
      sum[kind].peak += added[kind].peak;
      sum[kind].allocated += added[kind].allocated;
      sum[kind].freed += added[kind].freed;
    }
  };
#define TORCH_UVM_ADD(name) add_array(to.name, from.name);
  TORCH_UVM_STAT_ARRAYS(TORCH_UVM_ADD)
#undef TORCH_UVM_ADD
  to.num_alloc_retries += from.num_alloc_retries;
  to.num_ooms += from.num_ooms;
  to.num_sync_all_streams += from.num_sync_all_streams;
  to.num_device_alloc += from.num_device_alloc;
  to.num_device_free += from.num_device_free;
}

} // namespace torch_uvm
