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

void CachingManagedAllocator::State::collect_garbage(const Request& request, std::size_t bytes) noexcept {
  const auto& cap = cap_of(request.home);
  const std::optional<std::size_t> bound = cap ? cap : managed ? runtime.limit() : std::nullopt;
  if (!bound) {
    return;
  }
  const auto most = static_cast<std::size_t>(static_cast<double>(*bound) * *options.garbage_collection_threshold);
  const auto reserved = [&] { return cap ? taken(request.home.index) : runtime.managed_bytes(); };
  const auto is_looked_at = [&](Location home) { return !cap || home == request.home; };
  // Release those older than the average, oldest first, and repeat. Segments that are reused regularly survive longest.
  while (reserved() + bytes > most) {
    const std::uint64_t now = heap.clock();
    std::uint64_t ages = 0;
    std::uint64_t count = 0;
    for (int index = -1; index < devices; ++index) {
      const Segment* segment = is_looked_at(Location{index}) ? heap.unused(Location{index}).oldest : nullptr;
      for (; segment != nullptr; segment = segment->unused_after, ++count) {
        ages += now - segment->unused_since;
      }
    }
    if (count == 0) {
      return;
    }
    const Segment* oldest = nullptr;
    do {
      oldest = nullptr;
      for (int index = -1; index < devices; ++index) {
        const Segment* const segment = is_looked_at(Location{index}) ? heap.unused(Location{index}).oldest : nullptr;
        if (segment != nullptr && (oldest == nullptr || segment->unused_since < oldest->unused_since)) {
          oldest = segment;
        }
      }
      if (oldest == nullptr || (now - oldest->unused_since) * count < ages) {
        break;
      }
      release(heap.segments().find(oldest->address));
    } while (reserved() + bytes > most);
  }
}

} // namespace torch_uvm
