// Storages that have a block of ours to themselves, told from others by their deleter: managed ones, plain ones, and
// managed ones that the residency engine has on the host.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "allocator/caching/caching_managed_allocator.h"
#include "residency/engine/record.h"

namespace torch_uvm {

/// The allocator of plain device memory, where we supply that too: on the emulated accelerator. (On
/// CUDA plain memory is PyTorch's own.) Set once, before the first allocate_plain; never destroyed.
void set_plain_allocator(CachingManagedAllocator* allocator);
CachingManagedAllocator* plain_allocator(); ///< nullptr: PyTorch's own

/// A DataPtr that frees the block; an empty one of that kind for nullptr.
c10::DataPtr managed_data(Block* block, c10::Device device);
c10::DataPtr plain_data(Block* block, c10::Device device);

/// Of a storage that is on the host: frees the record.
/// \param ptr pinned memory
c10::DataPtr host_data(Record& record, void* ptr, c10::Device device);

/// Managed, and the storage alone has the block, which is its context: no second label, no copy on the host instead.
bool is_own_block(const c10::DataPtr& data);
bool is_plain(const c10::DataPtr& data);
/// A storage that the engine has on the host: its pointer is pinned memory, its context a record.
bool is_on_host(const c10::DataPtr& data);

} // namespace torch_uvm
