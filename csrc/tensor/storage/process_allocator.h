// The process's managed memory as the upstream of other allocators: what budgets and hints have to hear of is told.
#pragma once

#include <memory>

#include "allocator/allocator.h"

namespace torch_uvm {

/// Made with the runtime, at first use, and never destroyed. \throws RuntimeFailure where there is no backend
std::shared_ptr<Allocator> process_allocator();

} // namespace torch_uvm
