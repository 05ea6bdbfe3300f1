// Freeing, and pending blocks: those freed while work of other streams may still touch them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "allocator/caching/state.h"

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
  if (unrecorded_first == block) {
    unrecorded_first = block->pending_after;
  }
  block->pending_before = block->pending_after = nullptr;
}

void CachingManagedAllocator::State::free(Block* block) noexcept {
  if (block->state != BlockState::kAllocated) {
    // Continuing would give the same bytes to two owners.
    std::fprintf(stderr, "torch_uvm: a block was freed that is not allocated (freed twice?)\n");
    std::abort();
  }
  block->tag.store(nullptr, std::memory_order_relaxed); // under the mutex; a full barrier would cost each free 7 ns
  note_freed(block);
  const Location home = block->free_list->home;
  const PoolKind kind = pool_kind(block->segment->size_class);
  if (block->uses.empty() || in_forked_child) { // a child has no device work and never reuses blocks
    block->uses.clear();
    pool_statistics.freed(home, kind, block->bytes, block->requested);
    heap.release(block);
    return;
  }
  pool_statistics.freed_pending(home, kind, block->bytes, block->requested);
  block->state = BlockState::kPending;
  append_pending(block);
  if (unrecorded_first == nullptr) {
    unrecorded_first = block;
  }
  if (cap_of(home) || !managed) {
    record_pending(); // under a cap, or in plain device memory, record early so that the event completes early
  }
}

void CachingManagedAllocator::State::record_pending() noexcept {
  // One entry per stream; there are only a few. `event` is null if the stream was idle (`done`) or the runtime failed.
  struct Seen {
    Stream stream;
    std::shared_ptr<const Readiness> event;
    bool done = false;
  };
  std::vector<Seen> seen;
  for (Block* block = std::exchange(unrecorded_first, nullptr); block != nullptr;) {
    Block* const next = block->pending_after;
    std::erase_if(block->uses, [&](Use& use) {
      auto found = std::ranges::find(seen, use.stream, &Seen::stream);
      if (found == seen.end()) {
        try {
          found = seen.insert(found, Seen{use.stream, nullptr});
          if (!(found->done = runtime.query_stream(use.stream))) {
            found->event = stream_order.record(use.stream, heap.clock());
            pool_statistics.count(PoolStatistics::k_num_events_recorded, block->free_list->home);
          }
        } catch (...) {
          // Without an event, completion is unknown: the block waits until its device is synchronised.
          if (found == seen.end()) {
            return false;
          }
        }
      }
      use.event = found->event;
      return found->done;
    });
    if (block->uses.empty()) {
      reclaim(block);
    }
    block = next;
  }
}

void CachingManagedAllocator::State::reclaim(Block* block) noexcept {
  remove_pending(block);
  pool_statistics.reclaimed(block->free_list->home, pool_kind(block->segment->size_class), block->bytes);
  heap.release(block);
}

void CachingManagedAllocator::State::poll_pending(bool all) {
  if (unrecorded_first != nullptr) {
    record_pending();
  }
  for (Block* block = pending_first; block != nullptr;) {
    Block* const next = block->pending_after;
    std::vector<Use>& uses = block->uses;
    while (!uses.empty() && uses.back().event && runtime.query_event(uses.back().event->event)) {
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
  pool_statistics.count(PoolStatistics::k_num_sync_all_streams);
  if (unrecorded_first != nullptr) {
    record_pending();
  }
  while (pending_first != nullptr) {
    std::vector<Use>& uses = pending_first->uses;
    while (!uses.empty()) {
      const Use& use = uses.back();
      if (use.event) {
        runtime.synchronize_event(use.event->event);
      } else {
        runtime.synchronize_device(use.stream.device);
      }
      uses.pop_back();
    }
    reclaim(pending_first);
  }
}

} // namespace torch_uvm
