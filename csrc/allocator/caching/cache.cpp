// Serving a request from the cache or from a new segment.
#include "allocator/caching/state.h"

namespace torch_uvm {

Block* CachingManagedAllocator::State::best_fit(const Request& request, const FreeList& free_list) const {
  const std::size_t alignment = alignment_of(request);
  Block* block = free_list.free[static_cast<std::size_t>(request.kind)].best_fit(request.bytes, alignment);
  if (block == nullptr && request.kind == SizeClass::kMedium && shares(request.home)) {
    block = free_list.free[static_cast<std::size_t>(SizeClass::kLarge)].best_fit(request.bytes, alignment);
  }
  return block;
}

Block* CachingManagedAllocator::State::from_cache(const Request& request, Lock& lock) {
  const FreeList& own = heap.free_list(request.home, request.stream);
  if (Block* const block = best_fit(request, own)) {
    return take(block, request, lock);
  }
  if (pending_first != nullptr) {
    poll_pending(true);
    if (Block* const block = best_fit(request, own)) {
      return take(block, request, lock);
    }
  }
  // Use another stream's block only now: it costs an event and makes the streams wait for each other.
  Block* const block = heap.best_of_home(request.home, &own, [&](const FreeList& free_list) {
    Block* const fit = best_fit(request, free_list);
    return fit != nullptr && request.barred(runtime, free_list.stream) ? nullptr : fit;
  });
  return block == nullptr ? nullptr : take(block, request, lock);
}

Block* CachingManagedAllocator::State::take(Block* free, const Request& request, Lock& lock) {
  FreeList& free_list = heap.free_list(request.home, request.stream);
  // Under a cap, large blocks lie at the ends of what is free, and small ones, of which most never move, at the
  // beginnings: between large blocks these would split what could be one range.
  const bool at_end = cap_of(request.home) && request.kind == SizeClass::kLarge;
  Block* const block = heap.split_aligned(free, request.bytes, alignment_of(request), at_end);
  // A request that must not wait has already checked that it need not.
  if (block->free_list != &free_list && (request.may_wait || !request.stream.is_host())) {
    try {
      order_after(*block, request, lock);
    } catch (...) {
      heap.release(block);
      throw;
    }
  }
  return allocate(block, request, free_list);
}

void CachingManagedAllocator::State::order_after(const Block& free, const Request& request, Lock& lock) {
  if (!free.ready) {
    order(free.free_list->stream, request.stream, free.freed_at, request.home, lock);
    return;
  }
  const std::shared_ptr<const Readiness> ready = free.ready; // a copy, because the lock may be released below
  if (runtime.query_event(ready->event)) {
    return;
  }
  if (request.stream.is_host()) {
    pool_statistics.count(PoolStatistics::k_num_host_waits, request.home);
    const Unlocked unlocked(lock);
    runtime.synchronize_event(ready->event);
    return;
  }
  wait_for_memory(request.stream, ready->event);
}

void CachingManagedAllocator::State::order(Stream earlier, Stream later, std::uint64_t filed_at, Location home,
                                           Lock& lock) {
  // The host's work on a block is done when host code frees it. Work on a single stream is ordered anyway.
  if (filed_at == 0 || earlier.is_host() || earlier == later || stream_order.holds(earlier, later, filed_at)) {
    return;
  }
  const std::uint64_t now = heap.clock();
  if (runtime.query_stream(earlier)) {
    stream_order.note_done(earlier, now);
    return;
  }
  if (later.is_host()) {
    pool_statistics.count(PoolStatistics::k_num_host_waits, home);
    const Unlocked unlocked(lock);
    runtime.synchronize_stream(earlier);
    return;
  }
  bool fresh = false;
  const std::shared_ptr<const Readiness> event = stream_order.event_of(earlier, filed_at, now, fresh);
  if (fresh) {
    pool_statistics.count(PoolStatistics::k_num_events_recorded, home);
  }
  // Waits for the work recorded so far, even if the event is recorded again later.
  wait_for_memory(later, event->event);
  stream_order.note_wait(earlier, later);
}

void CachingManagedAllocator::State::wait_for_memory(Stream stream, Event event) {
  const auto queue = [&] { runtime.wait_event(stream, event); };
  if (pressure_callback != nullptr) {
    pressure_callback->waits_for_memory(stream, queue);
  } else {
    queue();
  }
}

void CachingManagedAllocator::State::wait_for_exclusive_devices() {
  for (const int device : exclusive) {
    runtime.synchronize_device(device);
  }
}

Block* CachingManagedAllocator::State::allocate(Block* reserved, const Request& request, FreeList& free_list) noexcept {
  reserved->free_list = &free_list;
  reserved->ready.reset();
  reserved->requested = request.requested;
  reserved->state = BlockState::kAllocated;
  reserved->read_by_host = request.home.is_host();
  pool_statistics.allocated(request.home, pool_kind(reserved->segment->size_class), reserved->bytes, request.requested);
  note_allocated(reserved);
  return reserved;
}

Block* CachingManagedAllocator::State::from_new_segment(const Request& request, std::size_t bytes, Lock& lock,
                                                        std::optional<OutOfMemory>& refusal, bool over_cap) {
  if (!cap_allows(request.home, bytes, over_cap)) {
    refusal.reset();
    return nullptr;
  }
  FreeList& free_list = heap.free_list(request.home, request.stream);
  Heap::Slot slot;
  heap.prepare(slot);
  const bool populates = options.populate && managed && !request.home.is_host();
  const SizeClass kind = request.kind == SizeClass::kMedium && shares(request.home) ? SizeClass::kLarge : request.kind;
  void* ptr = nullptr;
  bool populated = true;
  try {
    // Runtime calls may take milliseconds, and no other thread knows of this segment yet.
    std::optional<Unlocked> unlocked;
    if (!cap_of(request.home)) {
      unlocked.emplace(lock);
    }
    ptr = source->allocate(bytes, request.home);
    if (reinterpret_cast<std::uintptr_t>(ptr) % kBlockAlignment != 0) {
      source->free(ptr, bytes);
      throw RuntimeFailure("a segment of " + format_bytes(bytes) + " is not aligned to " +
                           std::to_string(kBlockAlignment) + " bytes");
    }
    if (populates) {
      populated = populate(ptr, bytes, request);
    }
  } catch (const OutOfMemory& error) {
    if (!request.home.is_host()) {
      caps[static_cast<std::size_t>(request.home.index)].refused = true;
    }
    refusal.emplace(error);
    return nullptr;
  }
  if (!populated) {
    pool_statistics.count(PoolStatistics::k_num_populate_failures, request.home);
  }
  if (!cap_allows(request.home, bytes, over_cap)) { // another thread has set a cap meanwhile
    source->free(ptr, bytes);
    refusal.reset();
    return nullptr;
  }
  note_segment(request.home, bytes);
  return take(heap.add_segment(slot, ptr, bytes, request.home, kind, free_list), request, lock);
}

bool CachingManagedAllocator::State::populate(void* ptr, std::size_t bytes, const Request& request) noexcept {
  try {
    const DeviceProperties device = runtime.device_properties(request.home.index);
    // Do not prefetch more than the device can hold: a driver was observed to hang on such a prefetch.
    if (device.concurrent_managed_access && bytes <= device.total_memory) {
      const Stream stream = request.stream.is_host() ? Stream::default_of(request.home.index) : request.stream;
      runtime.prefetch(ptr, bytes, request.home, stream);
    }
    return true;
  } catch (...) {
    // The prefetch is only a hint: without it the pages arrive by fault, at a fraction of the rate. The caller counts
    // it.
    return false;
  }
}

} // namespace torch_uvm
