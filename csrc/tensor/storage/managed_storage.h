// Storages in managed memory, recognised by their deleter.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include "allocator/caching/caching_managed_allocator.h"

namespace torch_uvm {

/// Managed memory for a storage labelled with `device`. In a process that was forked after first use: ordinary host
/// memory for the CPU, an error for any other device.
/// \param home,stream location and stream of the first use; the host's for a CPU label
/// \throws c10::OutOfMemoryError (torch.OutOfMemoryError), with a table of where the bytes are
c10::DataPtr allocate_managed(std::size_t bytes, Location home, Stream stream, c10::Device device);

/// Plain memory of `device`. \throws c10::OutOfMemoryError
c10::DataPtr allocate_plain(std::size_t bytes, Stream stream, c10::Device device);

/// Whether the bytes are managed. Decided by the deleter, so it holds for every tensor on the storage: views, detached
/// tensors, checkpoints loaded into it. A zero-byte storage is managed if it was allocated so.
bool is_managed(const c10::DataPtr& data);

/// Whether the bytes of `tensor` are managed. Looks through the wrappers of vmap and grad. False for tensors without
/// bytes of their own: meta, fake, functional, sparse and nested tensors.
bool is_managed(const at::Tensor& tensor);

/// The deleter of managed CPU tensors (host_tensors.h). Its context is the address, as c10::Allocator::raw_allocate
/// requires, so the block is looked up by address.
c10::DeleterFnPtr host_tensor_deleter();
bool is_host_tensor(const c10::DataPtr& data);

/// The number of live storages that share these bytes: 1 for managed memory without labels, 0 for other memory.
std::size_t label_count(const c10::Storage& storage);

/// The block behind a managed or plain DataPtr; nullptr for other memory, for zero-byte and adopted storages, and for
/// storages that the engine has evicted to the host. For memory of a user-chosen allocator, the (larger) block that
/// this allocator got from the caching allocator.
Block* block_of(const c10::DataPtr& data);

/// The owning DataPtr for an address that allocate_managed or allocate_plain returned; empty if it is not ours. For
/// callers that have only the pointer.
c10::DataPtr data_by_address(void* ptr, c10::Device device);

/// Records that `stream` also uses the bytes; a no-op for memory that is not ours.
void record_stream(const c10::DataPtr& data, Stream stream);

/// resize.cpp: overrides aten::resize_ for the CPU, and for CUDA in a CUDA build, with a check before PyTorch's own
/// kernel. PyTorch's kernel sets the tensor's sizes before the storage refuses to grow. The check also covers operators
/// that resize their `out=`. It costs one comparison for a resizable storage. Call once.
void register_resize_check();

} // namespace torch_uvm
