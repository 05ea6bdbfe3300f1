// Releasing cached segments before memory runs short.
#include <algorithm>
#include <vector>

#include "allocator/caching/state.h"

namespace torch_uvm {

bool CachingManagedAllocator::State::work_is_done(const Segment& segment) const noexcept {
  try {
    const Block* last = nullptr; // skips repeated queries: usually all blocks share one free list
    for (const Block* block = segment.first; block != nullptr; block = block->after) {
      const Stream stream = block->free_list->stream;
      if (stream.is_host() || block->freed_at == 0 ||
          (last != nullptr && last->free_list == block->free_list && last->ready == block->ready)) {
        continue;
      }
      if (!(block->ready ? runtime.query_event(block->ready->event) : runtime.query_stream(stream))) {
        return false;
      }
      last = block;
    }
    return true;
  } catch (...) {
    return false; // the device has failed, or a capture is in progress
  }
}

void CachingManagedAllocator::State::release_excess(Location home) noexcept {
  const Heap::Unused& unused = heap.unused(home);
  while (unused.bytes > *options.release_threshold && work_is_done(*unused.oldest)) {
    release(heap.segments().find(unused.oldest->address));
  }
}

} // namespace torch_uvm
