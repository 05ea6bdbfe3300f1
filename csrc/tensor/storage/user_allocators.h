// User-made allocators: their upstream, and the release of their idle memory when managed memory runs out.
#pragma once

#include <cstddef>
#include <memory>

#include "allocator/allocator.h"
#include "runtime/error.h"

namespace torch_uvm {

/// The process's caching allocator as an upstream. Budgets and hints are notified of its allocations and frees. Created
/// with the runtime at first use, never destroyed. \throws RuntimeFailure if there is no backend
std::shared_ptr<Allocator> process_allocator();

/// Registers an allocator for release_idle_memory, for as long as it lives. \return the allocator
std::shared_ptr<Allocator> remember(std::shared_ptr<Allocator> allocator);

/// Makes all registered allocators release their idle memory. Call with no lock held. \return bytes released
/// \throws RuntimeFailure
std::size_t release_idle_memory();

/// Calls `allocate()`. On OutOfMemory, releases idle memory and retries once if that released anything.
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
