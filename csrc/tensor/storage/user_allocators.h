// User-made allocators (arenas, allocation plans, pools, adaptors): their upstream, the release of their idle memory
// when managed memory runs out, and the storages whose bytes come from them.
//
// Each storage keeps its allocator alive. A registry finds the allocation by address, for callers that have only the
// pointer, such as c10::Allocator::raw_deallocate.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <vector>

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

// --- storages

/// \param home,stream location and stream of the first use
/// \throws c10::OutOfMemoryError; c10::ValueError if the allocator does not serve `home`
c10::DataPtr allocate_from(const std::shared_ptr<Allocator>& allocator, std::size_t bytes, Location home, Stream stream,
                           c10::Device device);

bool is_from_allocator(const c10::DataPtr& data);

/// The owning DataPtr of an allocation of this kind, found by its address; empty if there is none.
c10::DataPtr allocator_data_at(void* ptr, c10::Device device);

/// Records that `stream` also uses the bytes.
void record_allocator_stream(const c10::DataPtr& data, Stream stream);

/// The streams whose queued work may touch the bytes: the allocation's stream and the recorded ones.
std::vector<Stream> allocator_streams(const c10::DataPtr& data);

} // namespace torch_uvm
