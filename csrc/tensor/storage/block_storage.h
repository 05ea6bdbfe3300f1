// Storages that own one of our blocks exclusively, recognised by their deleter: managed ones, plain ones, and managed
// ones that the residency engine has evicted to the host.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "allocator/caching/caching_managed_allocator.h"
#include "residency/engine/record.h"

namespace torch_uvm {

/// The allocator of plain device memory on the emulated accelerator. On CUDA there is none: plain memory is PyTorch's
/// own. Set once, before the first allocate_plain; never destroyed.
void set_plain_allocator(CachingManagedAllocator* allocator);
CachingManagedAllocator* plain_allocator(); ///< nullptr if plain memory is PyTorch's own

/// A DataPtr that frees the block. For a null block, a null DataPtr that has the same deleter.
c10::DataPtr managed_data(Block* block, c10::Device device);
c10::DataPtr plain_data(Block* block, c10::Device device);

/// The DataPtr of a storage that is evicted to the host, or was created there. Its deleter tells the engine that the
/// storage has expired.
/// \param ptr the host copy, in pinned memory
c10::DataPtr host_data(Record& record, void* ptr, c10::Device device);

/// Whether the storage is managed and its context is a block that it owns exclusively: no labels, not evicted.
bool is_own_block(const c10::DataPtr& data);
bool is_plain(const c10::DataPtr& data);
/// Whether the engine has evicted the storage to the host: its pointer is pinned memory, its context a Record.
bool is_on_host(const c10::DataPtr& data);

/// Reports an allocation or a free to the PyTorch profiler, if it records memory.
/// \param memory the allocator whose totals are reported
/// \param change in bytes; negative for a free
void report_to_profiler(const CachingManagedAllocator& memory, void* ptr, std::int64_t change, Location home) noexcept;

} // namespace torch_uvm
