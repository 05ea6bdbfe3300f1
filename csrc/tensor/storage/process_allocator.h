// The process's caching allocator as an upstream for other allocators. Budgets and hints are notified of its
// allocations and frees.
#pragma once

#include <memory>

#include "allocator/allocator.h"

namespace torch_uvm {

/// Created with the runtime at first use, never destroyed. \throws RuntimeFailure if there is no backend
std::shared_ptr<Allocator> process_allocator();

} // namespace torch_uvm
