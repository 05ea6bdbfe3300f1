// Neighbours that slide together, so that the free blocks between them become one.
//
//   before   | free | A | B | free | C | free |
//   after    | A | B |      free        |  C  |
//
// A range begins and ends with a free block. The allocated ones are copied once, whichever way they slide. A block
// slides by the free bytes on the side that it slides to; a copy is no longer than that, because source and destination
// overlap. The ways are chosen so that the copies are few.
#include <algorithm>
#include <functional>
#include <optional>
#include <vector>

#include "allocator/caching/state.h"
#include "allocator/invariants.h"
#include "runtime/bytes.h"

namespace torch_uvm {

namespace {

constexpr std::size_t kMaxRanges = 64; // ranges whose copies are counted; the remaining ones cost even more
/// Maximum number of copies. A range that needs more is not taken.
constexpr std::size_t kMaxCopies = 512;
/// Cost of starting a copy, in bytes: a device copies as many in the 4 us that a launch takes.
constexpr double kCopy = 8 * MiB;

/// Appends the minimal ranges of a segment, from a free block to another one: their free blocks hold the request, and
/// would not without the first or the last one.
void add_ranges(const Segment& segment, std::size_t bytes, std::vector<Span>& ranges) {
  struct Piece {
    Block* block;
    double cost_before; ///< of the blocks between the previous piece and this one
  };
  std::vector<Piece> pieces; // since the last block that cannot slide, from index `front` on the range's
  std::size_t front = 0;
  std::size_t free = 0;
  double all = 0; // of the range
  double since = 0; // of the blocks since the last piece
  for (Block* block = segment.first; block != nullptr; block = block->after) {
    if (block->state != BlockState::kFree) {
      if (block->state != BlockState::kAllocated || block->free_list->home != segment.home) {
        pieces.clear();
        front = free = 0;
        all = since = 0;
      } else {
        since += static_cast<double>(block->bytes);
      }
      continue;
    }
    all += pieces.empty() ? 0 : since;
    pieces.push_back({block, since});
    since = 0;
    free += block->bytes;
    while (front + 1 < pieces.size() && free - pieces[front].block->bytes >= bytes) {
      free -= pieces[front].block->bytes;
      all -= pieces[++front].cost_before;
    }
    if (free >= bytes && free - block->bytes < bytes) {
      ranges.push_back({pieces[front].block, block, all});
    }
  }
}

/// The order in which the blocks of a range slide, with the fewest copies: the lower ones down, the others up.
struct Plan {
  std::vector<CachingManagedAllocator::Slides::Step> steps;
  std::size_t copies = 0;
};

Plan plan_of(const Span& range) {
  Plan plan;
  struct Sliding {
    void* tag;
    std::size_t bytes;
    std::size_t below; ///< free bytes
  };
  std::vector<Sliding> sliding;
  std::size_t free = range.last->bytes;
  for (const Block* block = range.first; block != range.last; block = block->after) {
    if (block->state == BlockState::kFree) {
      free += block->bytes;
    } else {
      sliding.push_back({block->tag, block->bytes, free - range.last->bytes});
    }
  }
  const auto copies = [](std::size_t bytes, std::size_t shift) { return (bytes + shift - 1) / shift; };
  std::size_t now = 0; // with the first `down` blocks sliding down
  for (const Sliding& each : sliding) {
    now += copies(each.bytes, free - each.below);
  }
  std::size_t least = now;
  std::size_t down = 0;
  for (std::size_t at = 0; at < sliding.size(); ++at) {
    now -= copies(sliding[at].bytes, free - sliding[at].below);
    now += copies(sliding[at].bytes, sliding[at].below);
    if (now <= least) {
      least = now;
      down = at + 1;
    }
  }
  plan.copies = least;
  for (std::size_t at = 0; at < down; ++at) {
    plan.steps.push_back({sliding[at].tag, false});
  }
  for (std::size_t at = sliding.size(); at-- > down;) {
    plan.steps.push_back({sliding[at].tag, true});
  }
  return plan;
}

} // namespace

std::optional<CachingManagedAllocator::Slides> CachingManagedAllocator::find_slides(std::size_t bytes, int device,
                                                                                    const BlockCost& slides,
                                                                                    double most) const {
  const State& state = *state_;
  state.check_device(device);
  const std::lock_guard lock(state.mutex);
  const std::size_t needed = state.bytes_for(bytes, Location::device(device));
  std::vector<Span> ranges;
  for (const auto& [address, segment] : state.heap.segments()) {
    if (segment.home == Location::device(device) && segment.bytes >= needed) {
      add_ranges(segment, needed, ranges);
    }
  }
  std::ranges::make_heap(ranges, std::greater{}, &Span::cost);
  std::optional<Slides> best;
  for (std::size_t tried = 0; tried < kMaxRanges; ++tried) {
    const auto range = take_cheapest(ranges, best ? best->cost : most, slides);
    if (!range) {
      break;
    }
    Plan plan = plan_of(*range);
    if (plan.steps.empty()) {
      return std::nullopt; // free neighbours hold the request already
    }
    const double whole = range->cost + kCopy * static_cast<double>(plan.copies);
    if (plan.copies <= kMaxCopies && whole <= most && (!best || whole < best->cost)) {
      best = Slides{std::move(plan.steps), whole};
    }
  }
  return best;
}

std::optional<CachingManagedAllocator::Move> CachingManagedAllocator::slide(Block* block, bool up, Stream stream) {
  State& state = *state_;
  state.check_stream(stream);
  std::unique_lock lock(state.mutex);
  const WalkAfterwards walk(state);
  const Location home = block->segment->home;
  Block* const first = up ? block->after : block->before;
  if (stream.is_host() || block->state != BlockState::kAllocated || block->free_list->home != home ||
      first == nullptr || first->state != BlockState::kFree) {
    return std::nullopt;
  }
  FreeList& free_list = state.heap.free_list(home, stream);
  Heap::Run run{first, first, 0};
  // `stream` writes to the free blocks, so it must wait for the work on them.
  const Request request = state.request(block->requested, home, stream);
  for (Block* free = first; free != nullptr && free->state == BlockState::kFree;
       free = up ? free->after : free->before) {
    if (const Stream earlier = free->free_list->stream; !earlier.is_host() && earlier != stream) {
      state.order_after(*free, request, lock); // `stream` is not the host's, so this keeps the lock
    }
    (up ? run.last : run.first) = free;
    run.bytes += free->bytes;
  }
  Block* const to = state.heap.split_range(run, run.bytes);
  Move move{.tag = block->tag,
            .from = block,
            .to = to,
            .source = reinterpret_cast<const void*>(block->address),
            .earlier = block->free_list->stream,
            .slid = true};
  state.pass_on(move, free_list);
  return move;
}

} // namespace torch_uvm
