// Other libraries' allocators behind our Allocator interface, so that one loop replays and times a log on all of them.
//
// Their upstream is ours: one managed allocation function, one limit, one count of reserved bytes. Each call costs one
// additional virtual call, the same as for our allocators. Streams and homes belong to one device.
#pragma once

#include <cstddef>
#include <memory>

#include "allocator/allocator.h"

namespace torch_uvm::peers {

/// PyTorch's native caching allocator, in a memory pool (torch.cuda.MemPool) over `below`. At most one exists at a
/// time: during its lifetime, all PyTorch allocations on the device use it. The device must be current and already in
/// use by PyTorch.
/// \throws InvalidArgument for another home; RuntimeFailure if PyTorch does not use its native allocator
std::shared_ptr<Allocator> make_torch_native(std::shared_ptr<Allocator> below, Location home);

/// RMM's pool_memory_resource, with a fixed size of `bytes` (a multiple of 256).
/// \throws OutOfMemory
std::shared_ptr<Allocator> make_rmm_pool(std::shared_ptr<Allocator> below, Location home, std::size_t bytes);

/// RMM's arena_memory_resource with a global arena of `bytes` (at least 1 MiB).
/// \throws OutOfMemory
std::shared_ptr<Allocator> make_rmm_arena(std::shared_ptr<Allocator> below, Location home, std::size_t bytes);

} // namespace torch_uvm::peers
