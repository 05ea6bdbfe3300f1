// Relocation of blocks that are in the way of a large request: reserve, commit, roll back.
#include <algorithm>
#include <functional>
#include <vector>

#include "allocator/caching/state.h"
#include "allocator/invariants.h"

namespace torch_uvm {

namespace {

constexpr std::size_t kMaxTried = 32; // windows to try: 99 % of what is found is among the first 16

/// Appends the minimal windows of a segment that together hold the request: they have an allocated block, none that
/// would not fit into `place`, and are too small without their first or last block.
void add_windows(const Segment& segment, std::size_t bytes, std::size_t place, std::vector<Span>& windows) {
  Span window;
  std::size_t all = 0;
  for (Block* block = segment.first; block != nullptr; block = block->after) {
    const bool free = block->state == BlockState::kFree;
    const bool may_move =
        block->state == BlockState::kAllocated && block->requested <= place && block->free_list->home == segment.home;
    if (!free && !may_move) {
      window = Span{};
      all = 0;
      continue;
    }
    window.first = window.first == nullptr ? block : window.first;
    window.last = block;
    window.cost += free ? 0 : static_cast<double>(block->bytes);
    all += block->bytes;
    while (all - window.first->bytes >= bytes) {
      window.cost -= window.first->state == BlockState::kFree ? 0 : static_cast<double>(window.first->bytes);
      all -= window.first->bytes;
      window.first = window.first->after;
    }
    // If the window suffices without its last block, a shorter one was found before.
    if (all >= bytes && all - block->bytes < bytes && window.cost > 0) {
      windows.push_back(window);
    }
  }
}

double price_of(const Span& span, const BlockCost& cost) {
  double price = 0;
  for (const Block* block = span.first;; block = block->after) {
    price += block->state == BlockState::kFree ? 0 : cost(block->tag, block->bytes);
    if (block == span.last) {
      return price;
    }
  }
}

} // namespace

std::optional<Span> take_cheapest(std::vector<Span>& spans, double most, const BlockCost& cost) {
  while (!spans.empty() && spans.front().cost <= most) {
    std::ranges::pop_heap(spans, std::greater{}, &Span::cost);
    Span span = spans.back();
    spans.pop_back();
    if (span.priced) {
      return span;
    }
    span.cost = price_of(span, cost);
    span.priced = true;
    if (span.cost < kNever) {
      spans.push_back(span);
      std::ranges::push_heap(spans, std::greater{}, &Span::cost);
    }
  }
  return std::nullopt;
}

/// Reserves destinations outside a window for all of its blocks, or for none.
class CachingManagedAllocator::State::Places {
 public:
  Places(State& state, int device, Stream stream) : state_(state), home_(Location::device(device)), stream_(stream) {}
  ~Places() {
    release();
  }
  Places(const Places&) = delete;
  Places& operator=(const Places&) = delete;

  /// \return false if not all blocks have a destination, or an owner refuses. Nothing has changed then
  bool find(const Span& window, std::size_t bytes, const BlockConsent& claim, Lock& lock) {
    std::vector<Block*> leaving;
    std::size_t passed = 0;
    for (Block* block = window.first;;) {
      Block* const next = block == window.last ? nullptr : block->after;
      if (block->state == BlockState::kAllocated) {
        leaving.push_back(block);
        passed += block->bytes;
      } else {
        // Free blocks of the window are not destinations, except for the part of the last one that the window does not
        // need.
        const std::size_t hidden = next == nullptr ? std::min(block->bytes, bytes - passed) : block->bytes;
        hidden_.reserve(hidden_.size() + 1);
        hidden_.push_back(state_.heap.split(block, hidden));
        passed += hidden;
      }
      if (next == nullptr) {
        break;
      }
      block = next;
    }
    std::ranges::stable_sort(leaving, std::greater{}, &Block::bytes);
    found_.reserve(leaving.size());
    for (Block* const from : leaving) {
      Request request = state_.request(from->requested, home_, stream_);
      request.may_wait = false;
      request.aligned = false; // `release` could not undo the split that an alignment needs
      Block* const free = place(request);
      if (free == nullptr) {
        release();
        return false;
      }
      Block* const to = state_.heap.split(free, request.bytes);
      found_.push_back({.tag = from->tag,
                        .from = from,
                        .to = to,
                        .source = reinterpret_cast<const void*>(from->address),
                        .earlier = from->free_list->stream});
      if (to->free_list->stream != stream_) {
        state_.order_after(*to, request, lock); // `stream_` is not the host's, so this keeps the lock
      }
    }
    if (!std::ranges::all_of(found_, [&](const Move& move) { return claim(move.tag); })) {
      release();
      return false;
    }
    return true;
  }

  /// Records in the statistics that the blocks have moved. The old blocks stay reserved.
  std::vector<Move> take() {
    FreeList& free_list = state_.heap.free_list(home_, stream_);
    for (Move& move : found_) {
      state_.pass_on(move, free_list);
    }
    std::vector<Move> moves;
    moves.swap(found_);
    return moves;
  }

 private:
  Block* place(const Request& request) const {
    const FreeList& own = state_.heap.free_list(home_, stream_);
    if (Block* const block = state_.best_fit(request, own)) {
      return block;
    }
    return state_.heap.best_of_home(home_, &own,
                                    [&](const FreeList& free_list) { return state_.best_fit(request, free_list); });
  }

  /// Releases in reverse order, so that every free block is restored exactly: windows point at the free blocks.
  void release() noexcept {
    for (; !found_.empty(); found_.pop_back()) {
      state_.heap.release(found_.back().to);
    }
    for (; !hidden_.empty(); hidden_.pop_back()) {
      state_.heap.release(hidden_.back());
    }
  }

  State& state_;
  const Location home_;
  const Stream stream_;
  std::vector<Block*> hidden_;
  std::vector<Move> found_;
};

namespace {

/// Two neighbours exchange their places. Exchanging them again restores both.
void exchange_places(Block* one, Block* other) {
  Block* const left = one->after == other ? one : other;
  std::swap(one->bytes, other->bytes);
  left->after->address = left->address + left->bytes;
}

} // namespace

void CachingManagedAllocator::State::pass_on(Move& move, FreeList& free_list) noexcept {
  Block* const from = move.from;
  pool_statistics.freed(from->free_list->home, pool_kind(from->segment->size_class), from->bytes, from->requested);
  note_freed(from);
  const Request moved = request(from->requested, free_list.home, free_list.stream);
  if (move.slid) {
    exchange_places(from, move.to);
  }
  allocate(move.to, moved, free_list);
  move.to->uses.swap(from->uses);
  move.recorded = std::erase_if(move.to->uses, [&](const Use& use) { return use.stream == free_list.stream; }) != 0;
  move.to->read_by_host = from->read_by_host;
  from->state = BlockState::kReserved;
  from->tag = nullptr;
}

void CachingManagedAllocator::State::take_back(const Move& move) noexcept {
  Block* const from = move.from;
  Block* const to = move.to;
  pool_statistics.freed(to->free_list->home, pool_kind(to->segment->size_class), to->bytes, to->requested);
  note_freed(to);
  if (move.slid) {
    exchange_places(from, to);
  }
  pool_statistics.allocated(from->free_list->home, pool_kind(from->segment->size_class), from->bytes, from->requested);
  note_allocated(from);
  from->state = BlockState::kAllocated;
  if (move.recorded) {
    // No reallocation: an entry was erased from this vector before.
    to->uses.push_back({to->free_list->stream, nullptr});
  }
  from->uses.swap(to->uses);
  // The owner may have recorded for `to` the stream that `from` belongs to.
  std::erase_if(from->uses, [&](const Use& use) { return use.stream == from->free_list->stream; });
  from->tag = move.tag;
}

std::vector<CachingManagedAllocator::Move> CachingManagedAllocator::reserve_moves(std::size_t bytes, int device,
                                                                                  Stream stream, const BlockCost& cost,
                                                                                  const BlockConsent& claim) {
  State& state = *state_;
  state.check_device(device);
  state.check_stream(stream);
  std::unique_lock lock(state.mutex);
  const WalkAfterwards walk(state);
  const std::size_t needed = state.bytes_for(bytes, Location::device(device));
  const std::size_t place = state.heap.largest_free(Location::device(device));
  std::vector<Span> windows;
  for (const auto& [address, segment] : state.heap.segments()) {
    if (segment.home == Location::device(device) && segment.bytes >= needed) {
      add_windows(segment, needed, place, windows);
    }
  }
  std::ranges::make_heap(windows, std::greater{}, &Span::cost);
  State::Places places(state, device, stream);
  for (std::size_t tried = 0; tried < kMaxTried; ++tried) {
    const auto window = take_cheapest(windows, kNever, cost);
    if (!window) {
      break;
    }
    if (places.find(*window, needed, claim, lock)) {
      return places.take();
    }
  }
  return {};
}

void CachingManagedAllocator::commit(const Move& move) noexcept {
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  move.from->free_list = move.to->free_list;
  state_->heap.release(move.from);
}

void CachingManagedAllocator::roll_back(const Move& move) noexcept {
  const std::lock_guard lock(state_->mutex);
  const WalkAfterwards walk(*state_);
  state_->take_back(move);
  state_->heap.release(move.to);
}

} // namespace torch_uvm
