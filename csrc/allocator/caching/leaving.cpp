// Address ranges that lose their memory while queued work still uses it.
//
// The memory is spare at once, in a segment of its own whose addresses are reserved and not mapped. The next request of
// its size gets it: a new block at those addresses, or a detached range at its own. The request's stream waits for the
// earlier work, and the host does not. Meanwhile the same memory is mapped twice. The range that it leaves is unmapped
// once the host sees that the work is done. So are the addresses of a range that was freed by then.
#include <algorithm>

#include "allocator/caching/state.h"
#include "allocator/invariants.h"

namespace torch_uvm {

void CachingManagedAllocator::State::leave(Segment& segment, Piece piece,
                                           std::shared_ptr<const Readiness> left) noexcept {
  segment.leaving = piece;
  segment.left = std::move(left);
  leaving.push_back(&segment);
}

void CachingManagedAllocator::State::finish_leaving(Segment& segment) {
  if (!segment.leaving) {
    return;
  }
  runtime.synchronize_event(segment.left->event);
  ranges->unmap(reinterpret_cast<void*>(segment.address), segment.leaving);
  segment.leaving = Piece{};
  segment.left.reset();
  std::erase(leaving, &segment);
  if (segment.first->state == BlockState::kPending) {
    remove_detached(segment.first);
  }
}

void CachingManagedAllocator::State::finish_all_leaving() {
  while (!leaving.empty()) {
    finish_leaving(*leaving.back());
  }
}

void CachingManagedAllocator::State::finish_leaving(Piece piece) noexcept {
  try {
    for (std::size_t at = leaving.size(); at-- > 0;) {
      if (leaving[at]->leaving.handle == piece.handle) {
        finish_leaving(*leaving[at]);
      }
    }
  } catch (...) {
    // The device has failed. The memory stays until the range goes.
  }
}

void CachingManagedAllocator::State::poll_leaving() noexcept {
  try {
    while (!in_forked_child && !leaving.empty() && runtime.query_event(leaving.front()->left->event)) {
      finish_leaving(*leaving.front());
    }
  } catch (...) {
    // Tried again when the next range is needed.
  }
}

void CachingManagedAllocator::State::map_spare(Segment& segment) {
  if (!segment.is_mapped) {
    ranges->map(reinterpret_cast<void*>(segment.address), segment.piece, segment.home.index);
    segment.is_mapped = true;
  }
}

bool CachingManagedAllocator::State::attach_spare(Block* block, const Request& request, FreeList& free_list,
                                                  Lock& lock) {
  const auto fits = [&](const FreeList& list) {
    Block* const found = best_fit(request, list);
    return found != nullptr && !found->segment->is_mapped ? found : nullptr;
  };
  Block* const spare = request.stream.is_host() ? nullptr : heap.best_of_home(request.home, nullptr, fits);
  if (spare == nullptr) {
    return false;
  }
  order_after(*spare, request, lock); // the lock is kept: only the host's stream waits without it
  const auto position = heap.segments().find(spare->segment->address);
  void* const unmapped = reinterpret_cast<void*>(position->first);
  const Piece piece = position->second.piece;
  ranges->map(reinterpret_cast<void*>(block->address), piece, request.home.index);
  heap.remove_segment(position);
  ranges->release(unmapped, piece.bytes);
  block->segment->piece = piece;
  heap.attach(block, free_list);
  return true;
}

void CachingManagedAllocator::detach_after(Block* block, Event ready, Stream stream) {
  State& state = *state_;
  state.check_stream(stream);
  std::unique_lock lock(state.mutex);
  const WalkAfterwards walk(state);
  Segment& segment = state.check_attached(block);
  const Location home = segment.home;
  state.poll_leaving();
  FreeList& free_list = state.heap.free_list(home, stream);
  state.leaving.reserve(state.leaving.size() + 1);
  Heap::Slot slot;
  state.heap.prepare(slot);
  void* const unmapped = state.ranges->reserve(segment.bytes, home.index);
  std::shared_ptr<const Readiness> left;
  try {
    left = std::make_shared<const Readiness>(state.events, stream, ready); // owns the event; nothing throws after it
  } catch (...) {
    state.ranges->release(unmapped, segment.bytes);
    throw;
  }
  const Piece piece = std::exchange(segment.piece, Piece{});
  state.leave(segment, piece, left);
  state.heap.detach(block);
  Block* const spare = state.heap.add_segment(slot, unmapped, piece.bytes, home, SizeClass::kRange, free_list);
  spare->segment->piece = piece;
  spare->segment->is_mapped = false;
  spare->ready = std::move(left);
  state.caps[static_cast<std::size_t>(home.index)].refused = false;
}

bool CachingManagedAllocator::is_leaving(const Block* block) {
  const std::lock_guard lock(state_->mutex);
  state_->poll_leaving();
  return static_cast<bool>(block->segment->leaving);
}

} // namespace torch_uvm
