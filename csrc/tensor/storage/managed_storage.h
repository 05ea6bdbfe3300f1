// Storages whose bytes come from the managed allocator, told from others by their deleter.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include "allocator/caching/caching_managed_allocator.h"

namespace torch_uvm {

/// Managed memory for a storage labelled with `device`.
/// \param home,stream who uses it first; the host and no stream for a CPU label
/// In a process forked after first use, ordinary host memory for a CPU label; an error for any other.
/// \throws c10::OutOfMemoryError (torch.OutOfMemoryError), with a table of where the bytes are
c10::DataPtr allocate_managed(std::size_t bytes, Location home, Stream stream, c10::Device device);

/// Plain memory of the device that `device` names, with the same error.
c10::DataPtr allocate_plain(std::size_t bytes, Stream stream, c10::Device device);

/// By the deleter, so that it holds for whatever wraps the storage: views, detached tensors, what a
/// checkpoint was loaded into. Zero-size storages count by their allocation, too.
bool is_managed(const c10::DataPtr& data);

/// The deleter of managed memory whose context is its address, as c10::Allocator::raw_allocate wants it: the block is
/// found by the address. CPU tensors have it (host_tensors.h).
c10::DeleterFnPtr host_tensor_deleter();
bool is_host_tensor(const c10::DataPtr& data);

/// How many live storages share these bytes; 1 for managed memory that was never moved, 0 for other memory.
std::size_t label_count(const c10::Storage& storage);

/// The block behind a managed or plain DataPtr; nullptr for others, for empty ones, and for storages that the
/// residency engine has on the host. Of memory from another allocator, the block that this one has it from, which is
/// larger.
Block* block_of(const c10::DataPtr& data);

/// A DataPtr for memory of which only the address is known, by searching for it, as allocate_managed and allocate_plain
/// make them; empty if it is not ours.
c10::DataPtr data_by_address(void* ptr, c10::Device device);

/// Says that `stream`, too, uses the bytes; ignored for memory that is not ours.
void record_stream(const c10::DataPtr& data, Stream stream);

} // namespace torch_uvm
