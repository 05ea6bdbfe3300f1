// What other allocators keep and nobody uses, for when memory runs short.
#pragma once

#include <cstddef>
#include <memory>

#include "allocator/allocator.h"
#include "runtime/error.h"

namespace torch_uvm {

/// It is asked to release what it keeps whenever memory runs short; until it is gone. \return the same
std::shared_ptr<Allocator> remember(std::shared_ptr<Allocator> allocator);

/// All that are remembered release what nobody uses. With no lock held. \return bytes \throws RuntimeFailure
std::size_t release_idle_memory();

/// `allocate()`, once more where memory was refused and others had some to spare.
template <typename Allocate>
auto with_idle_memory(const Allocate& allocate) {
  try {
    return allocate();
  } catch (const OutOfMemory&) {
    if (release_idle_memory() == 0) {
      throw;
    }
  }
  return allocate();
}

} // namespace torch_uvm
