// Allocators of others behind our face, so that a log is replayed on them by the loop that times ours.
//
// What they take memory from is ours: one managed allocation function, one limit, one count of what is reserved.
// Nothing is added to a call of theirs but the virtual one that ours have, too. Streams and homes of one device.
#pragma once

#include <cstddef>
#include <memory>

#include "allocator/allocator.h"

namespace torch_uvm::peers {

/// PyTorch's native caching allocator, in a memory pool (torch.cuda.MemPool) over `below`. One at a time: while there
/// is one, all that PyTorch allocates on the device comes from it. The device is current, and PyTorch uses it already.
/// \throws InvalidArgument for another home; RuntimeFailure where another allocator than the native one is in its place
std::shared_ptr<Allocator> make_torch_native(std::shared_ptr<Allocator> below, Location home);

/// RMM's pool_memory_resource, with `bytes` (a multiple of 256) from the beginning, and never more.
/// \throws OutOfMemory
std::shared_ptr<Allocator> make_rmm_pool(std::shared_ptr<Allocator> below, Location home, std::size_t bytes);

/// RMM's arena_memory_resource, whose global arena has `bytes` (1 MiB or more).
/// \throws OutOfMemory
std::shared_ptr<Allocator> make_rmm_arena(std::shared_ptr<Allocator> below, Location home, std::size_t bytes);

} // namespace torch_uvm::peers
