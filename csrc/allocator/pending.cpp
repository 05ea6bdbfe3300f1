// Freeing, and blocks that were freed while work of other streams may still touch them.
#include <cstdio>
#include <cstdlib>

#include "allocator/state.h"

namespace torch_uvm {

void CachingManagedAllocator::State::append_pending(Block* block) noexcept {
  block->pending_before = pending_last;
  block->pending_after = nullptr;
  (pending_last != nullptr ? pending_last->pending_after : pending_first) = block;
  pending_last = block;
}

void CachingManagedAllocator::State::remove_pending(Block* block) noexcept {
  (block->pending_before != nullptr ? block->pending_before->pending_after : pending_first) = block->pending_after;
  (block->pending_after != nullptr ? block->pending_after->pending_before : pending_last) = block->pending_before;
  block->pending_before = block->pending_after = nullptr;
}

void CachingManagedAllocator::State::free(Block* block) noexcept {
  if (block->state != BlockState::kAllocated) {
    // Going on would hand the same bytes to two owners.
    std::fprintf(stderr, "torch_uvm: a block was freed that is not allocated (freed twice?)\n");
    std::abort();
  }
  block->tag = nullptr;
  note_freed(block);
  const Location home = block->lane->home;
  const PoolKind kind = pool_kind(block->segment->size_class);
  if (block->uses.empty() || in_forked_child) { // the child has no device work, and nobody will reuse it there
    block->uses.clear();
    ledger.freed(home, kind, block->bytes, block->requested);
    heap.release(block);
    return;
  }
  for (Use& use : block->uses) {
    try {
      use.event = events.record(use.stream);
      ledger.count(Ledger::k_num_events_recorded, home);
    } catch (...) {
      // Without an event nobody can tell when it is over: the block waits for a device synchronisation.
      use.event = Event{};
    }
  }
  ledger.freed_pending(home, kind, block->bytes, block->requested);
  block->state = BlockState::kPending;
  append_pending(block);
}

void CachingManagedAllocator::State::reclaim(Block* block) noexcept {
  remove_pending(block);
  ledger.reclaimed(block->lane->home, pool_kind(block->segment->size_class), block->bytes);
  heap.release(block);
}

void CachingManagedAllocator::State::poll_pending(bool all) {
  for (Block* block = pending_first; block != nullptr;) {
    Block* const next = block->pending_after;
    std::vector<Use>& uses = block->uses;
    while (!uses.empty() && uses.back().event && runtime.query_event(uses.back().event)) {
      events.give(uses.back().stream, uses.back().event);
      uses.pop_back();
    }
    if (uses.empty()) {
      reclaim(block);
    } else if (!all) {
      return;
    }
    block = next;
  }
}

void CachingManagedAllocator::State::wait_for_pending() {
  if (pending_first == nullptr) {
    return;
  }
  ledger.count(Ledger::k_num_sync_all_streams);
  while (pending_first != nullptr) {
    std::vector<Use>& uses = pending_first->uses;
    while (!uses.empty()) {
      const Use use = uses.back();
      if (use.event) {
        runtime.synchronize_event(use.event);
        events.give(use.stream, use.event);
      } else {
        runtime.synchronize_device(use.stream.device);
      }
      uses.pop_back();
    }
    reclaim(pending_first);
  }
}

} // namespace torch_uvm
