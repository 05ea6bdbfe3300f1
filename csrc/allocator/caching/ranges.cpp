// Segments that are address ranges: one block each, and memory that can be taken away and given back.
//
// A range is attached while it has a piece of device memory. It is then a segment like others: it counts towards the
// cap, and a freed block stays cached for the next request of its size. A detached range belongs to its owner, takes no
// memory and is in no statistics. Ranges need no contiguous memory, so they never move and never merge.
#include <algorithm>

#include "allocator/caching/state.h"
#include "allocator/invariants.h"

namespace torch_uvm {

Request CachingManagedAllocator::State::request_for(std::size_t requested, Location home, Stream stream,
                                                    Memory memory) const {
  Request request(requested, bytes_for(requested, home), home, stream);
  const bool is_asked_for = memory == Memory::kRange && ranges != nullptr;
  if (is_asked_for || (memory == Memory::kAny && takes_range(requested, home))) {
    request.kind = SizeClass::kRange;
    request.bytes = round_up(requested, kLargeGranularity);
  }
  return request;
}

void CachingManagedAllocator::State::note_range_end(Block* block) noexcept {
  const Stream stream = block->free_list->stream;
  if (!is_range(block) || block->ready || block->idle || stream.is_host() || in_forked_child) {
    return;
  }
  try {
    block->idle = runtime.query_stream(stream);
    if (!block->idle) {
      block->ready = stream_order.record(stream, heap.clock());
      pool_statistics.count(PoolStatistics::k_num_events_recorded, block->free_list->home);
    }
  } catch (...) {
    // Its release waits for the device.
  }
}

void CachingManagedAllocator::State::release_range(void* range, Piece piece, bool is_mapped, bool work_is_done,
                                                   const std::shared_ptr<const Readiness>& ready) noexcept {
  try {
    if (!work_is_done && is_mapped && ready) {
      runtime.synchronize_event(ready->event);
    }
    for (int device = 0; !work_is_done && is_mapped && !ready && device < devices; ++device) {
      if (piece.device == device || piece.device == Location::host().index) {
        runtime.synchronize_device(device);
      }
    }
    if (is_mapped) {
      ranges->unmap(range, piece);
    }
  } catch (...) {
    return; // the device has failed; leaking the memory is safer
  }
  finish_leaving(piece);
  source->free_range(range, piece);
}

void CachingManagedAllocator::State::free_detached(Block* block) noexcept {
  block->tag.store(nullptr, std::memory_order_relaxed);
  note_freed(block);
  if (block->segment->leaving && !in_forked_child) {
    block->state = BlockState::kPending; // until it has left
    return;
  }
  remove_detached(block);
}

void CachingManagedAllocator::State::remove_detached(Block* block) noexcept {
  void* const range = reinterpret_cast<void*>(block->address);
  const std::size_t bytes = block->segment->bytes;
  const bool is_free = !block->segment->host_copy && !in_forked_child; // else leaking the addresses is safer
  std::erase(leaving, block->segment);
  heap.remove_detached(block);
  if (is_free) {
    ranges->release(range, bytes);
  }
}

std::optional<std::string> CachingManagedAllocator::State::check_ranges() const {
  const auto wrong = [](const Segment& segment, const char* what) {
    return "the address range at " + std::to_string(segment.address) + " " + what;
  };
  for (const auto& [address, segment] : heap.segments()) {
    const bool is_range = segment.size_class == SizeClass::kRange;
    if (is_range != static_cast<bool>(segment.piece)) {
      return wrong(segment, "is attached without memory, or is none and has some");
    }
    if (is_range && (segment.first->after != nullptr || segment.piece.bytes != segment.bytes)) {
      return wrong(segment, "is split, or has memory of another size");
    }
    if ((!segment.is_mapped && segment.used != 0) || segment.leaving || segment.host_copy) {
      return wrong(segment, "is in use and not mapped, or is attached and has other memory");
    }
  }
  for (const auto& [address, segment] : heap.detached()) {
    if (segment.piece || segment.size_class != SizeClass::kRange || address != segment.address) {
      return wrong(segment, "is detached with memory, is none, or is misplaced");
    }
    const BlockState state = segment.first->state;
    const bool is_detached = state == BlockState::kDetached || (state == BlockState::kPending && segment.leaving);
    if (!is_detached || !segment.first->uses.empty()) {
      return wrong(segment, "is detached and in use");
    }
    if (segment.leaving && segment.host_copy) {
      return wrong(segment, "has the memory of a host copy and is leaving");
    }
    const auto known = std::ranges::count(leaving, &segment);
    if (known != (segment.leaving ? 1 : 0) || static_cast<bool>(segment.leaving) != static_cast<bool>(segment.left)) {
      return wrong(segment, "is leaving and not listed, or the opposite");
    }
  }
  return std::nullopt;
}

bool CachingManagedAllocator::is_range(const Block* block) noexcept {
  return block != nullptr && block->segment->size_class == SizeClass::kRange;
}

Segment& CachingManagedAllocator::State::check_attached(const Block* block) const {
  check_not_forked();
  if (!is_range(block) || block->state != BlockState::kAllocated) {
    throw InvalidArgument("only an allocated address range that has memory can lose it");
  }
  return *block->segment;
}

void CachingManagedAllocator::detach(Block* block) {
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  const WalkAfterwards walk(state);
  Segment& segment = state.check_attached(block);
  state.ranges->unmap(reinterpret_cast<void*>(block->address), segment.piece);
  state.finish_leaving(segment.piece); // another range, whose work was done before that of this one
  state.ranges->free_piece(std::exchange(segment.piece, Piece{}));
  state.caps[static_cast<std::size_t>(segment.home.index)].refused = false;
  state.heap.detach(block);
}

bool CachingManagedAllocator::has_ranges() const noexcept {
  return state_->ranges != nullptr;
}

bool CachingManagedAllocator::takes_range(std::size_t bytes, int device) const {
  state_->check_device(device);
  const std::lock_guard lock(state_->mutex);
  return state_->takes_range(bytes, Location::device(device));
}

std::size_t CachingManagedAllocator::bytes_taken(std::size_t requested, int device) const {
  state_->check_device(device);
  const std::lock_guard lock(state_->mutex);
  return state_->request_for(requested, Location::device(device), Stream::host(), Memory::kAny).bytes;
}

bool CachingManagedAllocator::attach(Block* block, Stream stream, Room room) {
  State& state = *state_;
  state.check_stream(stream);
  std::unique_lock lock(state.mutex);
  const WalkAfterwards walk(state);
  state.check_not_forked();
  if (!is_range(block) || (block->state != BlockState::kAllocated && block->state != BlockState::kDetached)) {
    throw InvalidArgument("only an address range of a caller can be given memory");
  }
  if (block->segment->host_copy) {
    throw InvalidArgument("an address range that has the memory of a host copy; unmap that first");
  }
  if (block->state == BlockState::kAllocated) {
    return true;
  }
  const Location home = block->segment->home;
  Request request = state.request_for(block->requested, home, stream, Memory::kRange);
  request.may_wait = room == Room::kWait;
  FreeList& free_list = state.heap.free_list(home, stream);
  state.poll_leaving();
  state.finish_leaving(*block->segment);
  if (state.attach_spare(block, request, free_list, lock)) {
    return true;
  }
  for (const bool refused : {false, true}) {
    // Cached segments are spare memory. On a full device the host waits for their work in any case.
    if (refused) {
      state.release(home);
    } else if (!state.fit_under_cap(request, block->bytes)) {
      if (state.pending_first == nullptr) {
        return false;
      }
      request.may_wait ? state.wait_for_pending() : state.poll_pending(true);
      if (!state.fit_under_cap(request, block->bytes)) {
        return false;
      }
    }
    const State::Claim claim(state, home, block->bytes, /*over_cap=*/false);
    if (!claim) {
      return false;
    }
    Piece piece;
    try {
      const Unlocked unlocked(lock);
      piece = state.ranges->allocate_piece(block->bytes, home.index);
      state.ranges->map(reinterpret_cast<void*>(block->address), piece, home.index);
    } catch (const OutOfMemory&) {
      state.ranges->free_piece(piece);
      claim.refused();
      continue;
    } catch (...) {
      state.ranges->free_piece(piece);
      throw;
    }
    claim.made();
    block->segment->piece = piece;
    state.heap.attach(block, free_list);
    return true;
  }
  return false;
}

} // namespace torch_uvm
