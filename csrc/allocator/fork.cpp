// The allocator's part of a fork.
#include "allocator/state.h"

namespace torch_uvm {

void CachingManagedAllocator::before_fork() {
  State& state = *state_;
  state.mutex.lock();
  if (!state.managed || state.in_forked_child) {
    return; // nothing that a child lacks: a child's own memory is ordinary
  }
  for (const auto& [address, segment] : state.heap.segments()) {
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      if (block->state == BlockState::kAllocated && block->read_by_host) {
        state.fork_copies.plan({block->address, block->address + block->bytes}, {address, address + segment.bytes});
      }
    }
  }
  if (!state.fork_copies.empty()) {
    state.available_to_child = state.runtime.host_memory_available(); // asked before its lock is held
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
