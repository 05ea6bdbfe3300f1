// The allocator's fork handlers.
#include <algorithm>
#include <exception>

#include "allocator/caching/state.h"

namespace torch_uvm {
namespace {

/// Waits for the work that may still write a block. Skips streams in `finished`, and adds the ones it waited for.
void finish_work_on(const Block& block, ManagedRuntime& runtime, std::vector<Stream>& finished) noexcept {
  const auto finish = [&](Stream stream) {
    if (stream.is_host() || std::ranges::find(finished, stream) != finished.end()) {
      return;
    }
    try {
      finished.push_back(stream);
      runtime.synchronize_stream(stream);
    } catch (const std::exception&) {
      // A stream under capture cannot be waited for. The child gets the current contents.
    }
  };
  finish(block.free_list->stream);
  for (const Use& use : block.uses) {
    finish(use.stream);
  }
}

} // namespace

void CachingManagedAllocator::before_fork() {
  State& state = *state_;
  state.mutex.lock();
  if (!state.managed || state.in_forked_child) {
    return; // only managed memory is missing in a child; a child's own memory is inherited normally
  }
  std::vector<Stream> finished;
  for (const auto& [address, segment] : state.heap.segments()) {
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      if (block->state == BlockState::kAllocated && block->read_by_host) {
        finish_work_on(*block, state.runtime, finished); // a copy taken during a write would be torn
        state.fork_copies.plan({block->address, block->address + block->bytes}, {address, address + segment.bytes});
      }
    }
  }
  if (!state.fork_copies.empty()) {
    try {
      state.wait_for_exclusive_devices();
    } catch (const std::exception&) {
      // Copy what is there, as above.
    }
    state.available_to_child = state.runtime.host_memory_available(); // queried now, before the runtime's lock is held
  }
}

void CachingManagedAllocator::copy_for_child() noexcept {
  state_->fork_copies.make(state_->available_to_child);
}

void CachingManagedAllocator::after_fork_in_parent() noexcept {
  state_->fork_copies.drop();
  state_->mutex.unlock();
}

void CachingManagedAllocator::after_fork_in_child() noexcept {
  state_->fork_copies.move_into_place();
  state_->in_forked_child = true;
  state_->mutex.unlock();
}

} // namespace torch_uvm
