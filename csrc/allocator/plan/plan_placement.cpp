#include "allocator/plan/plan_placement.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <map>
#include <queue>
#include <set>
#include <utility>

#include "allocator/allocator.h"
#include "runtime/bytes.h"

namespace torch_uvm {
namespace {

/// Pieces from this size on have the alignment of the caching allocator's blocks.
constexpr std::size_t kWide = 1 * MiB;
constexpr std::size_t kWideAlignment = 512;

} // namespace

std::size_t PlanPiece::alignment() const {
  return bytes >= kWide ? kWideAlignment : kAllocationAlignment;
}

std::size_t piece_bytes(std::size_t requested) {
  return round_up(requested, requested >= kWide ? kWideAlignment : kAllocationAlignment);
}

GapPlacement::Chunk::Chunk() {
  std::fill_n(begin, kChunk, std::numeric_limits<std::int32_t>::max());
  std::fill_n(end, kChunk, std::numeric_limits<std::int32_t>::min());
}

std::uint64_t GapPlacement::overlapping(const Chunk& chunk, std::int32_t begin, std::int32_t end) {
  unsigned char flags[kChunk]; // compilers vectorise this loop
  for (unsigned i = 0; i < kChunk; ++i) {
    flags[i] = static_cast<unsigned char>((chunk.begin[i] < end) & (begin < chunk.end[i]));
  }
  std::uint64_t bits = 0;
  for (unsigned i = 0; i < kChunk; i += 8) {
    std::uint64_t eight;
    std::memcpy(&eight, flags + i, 8);
    // Pack eight bytes of 0 or 1 into eight bits: the product shifts each to the top byte, without collisions.
    bits |= static_cast<std::uint64_t>((eight * 0x0102040810204080ULL) >> 56) << i;
  }
  return bits;
}

std::size_t GapPlacement::place(const PlanPiece& piece) {
  std::size_t free_from = 0; // end of the highest overlapping piece so far
  std::size_t best = 0;
  std::size_t best_gap = std::numeric_limits<std::size_t>::max();
  const std::size_t alignment = piece.alignment();
  for (const std::unique_ptr<Chunk>& chunk : chunks_) {
    for (std::uint64_t bits = overlapping(*chunk, piece.begin, piece.end); bits != 0; bits &= bits - 1) {
      const int i = std::countr_zero(bits);
      const std::size_t start = round_up(free_from, alignment);
      if (chunk->offset[i] >= start + piece.bytes && chunk->offset[i] - free_from < best_gap) {
        best = start;
        best_gap = chunk->offset[i] - free_from;
      }
      free_from = std::max(free_from, chunk->top[i]);
    }
  }
  if (best_gap == std::numeric_limits<std::size_t>::max()) {
    best = round_up(free_from, alignment);
  }
  insert(piece, best);
  top_ = std::max(top_, best + piece.bytes);
  return best;
}

void GapPlacement::insert(const PlanPiece& piece, std::size_t offset) {
  const auto after = std::ranges::upper_bound(chunks_, offset, {}, [](const auto& chunk) { return chunk->offset[0]; });
  std::size_t at = static_cast<std::size_t>(after - chunks_.begin());
  at -= at > 0 ? 1 : 0;
  if (chunks_.empty()) {
    chunks_.push_back(std::make_unique<Chunk>());
  } else if (chunks_[at]->count == kChunk) {
    auto upper = std::make_unique<Chunk>();
    Chunk& lower = *chunks_[at];
    constexpr unsigned kHalf = kChunk / 2;
    const auto move_half = [](auto* from, auto* to, auto unused) {
      std::copy_n(from + kHalf, kHalf, to);
      std::fill_n(from + kHalf, kHalf, unused);
    };
    move_half(lower.begin, upper->begin, std::numeric_limits<std::int32_t>::max());
    move_half(lower.end, upper->end, std::numeric_limits<std::int32_t>::min());
    move_half(lower.offset, upper->offset, std::size_t{0});
    move_half(lower.top, upper->top, std::size_t{0});
    lower.count = upper->count = kHalf;
    const bool into_upper = upper->offset[0] <= offset;
    chunks_.insert(chunks_.begin() + static_cast<std::ptrdiff_t>(at) + 1, std::move(upper));
    at += into_upper ? 1 : 0;
  }
  Chunk& chunk = *chunks_[at];
  const auto place =
      static_cast<unsigned>(std::upper_bound(chunk.offset, chunk.offset + chunk.count, offset) - chunk.offset);
  const auto put = [&](auto* values, auto value) {
    std::copy_backward(values + place, values + chunk.count, values + chunk.count + 1);
    values[place] = value;
  };
  put(chunk.begin, piece.begin);
  put(chunk.end, piece.end);
  put(chunk.offset, offset);
  put(chunk.top, offset + piece.bytes);
  ++chunk.count;
}

std::size_t sweep(const std::vector<PlanPiece>& pieces, std::size_t base, std::vector<std::size_t>& offsets) {
  std::map<std::size_t, std::size_t> holes; // offset -> bytes; no two are adjacent
  std::set<std::pair<std::size_t, std::size_t>> by_size; // bytes, offset
  std::size_t end_of_holes = base; // memory above is unused
  std::size_t top = base;
  const auto add = [&](std::size_t offset, std::size_t bytes) {
    holes.emplace(offset, bytes);
    by_size.emplace(bytes, offset);
  };
  const auto remove = [&](std::map<std::size_t, std::size_t>::iterator hole) {
    by_size.erase({hole->second, hole->first});
    return holes.erase(hole);
  };
  const auto give = [&](std::size_t offset, std::size_t bytes) {
    auto above = holes.lower_bound(offset);
    if (above != holes.end() && above->first == offset + bytes) {
      bytes += above->second;
      above = remove(above);
    }
    if (above != holes.begin()) {
      const auto below = std::prev(above);
      if (below->first + below->second == offset) {
        offset = below->first;
        bytes += below->second;
        remove(below);
      }
    }
    if (offset + bytes == end_of_holes) {
      end_of_holes = offset;
    } else {
      add(offset, bytes);
    }
  };
  using Free = std::pair<std::int32_t, std::size_t>; // time, index of the piece
  std::priority_queue<Free, std::vector<Free>, std::greater<>> to_free;
  offsets.resize(pieces.size());
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const PlanPiece& piece = pieces[i];
    for (; !to_free.empty() && to_free.top().first <= piece.begin; to_free.pop()) {
      give(offsets[to_free.top().second], pieces[to_free.top().second].bytes);
    }
    auto fit = by_size.lower_bound({piece.bytes, 0});
    while (fit != by_size.end() && round_up(fit->second, piece.alignment()) + piece.bytes > fit->second + fit->first) {
      ++fit; // too small with the alignment
    }
    std::size_t hole = end_of_holes, hole_end = end_of_holes;
    if (fit != by_size.end()) {
      hole = fit->second;
      hole_end = hole + fit->first;
      remove(holes.find(hole));
    }
    offsets[i] = round_up(hole, piece.alignment());
    const std::size_t piece_end = offsets[i] + piece.bytes;
    if (hole_end < piece_end) {
      end_of_holes = piece_end;
    } else if (piece_end < hole_end) {
      add(piece_end, hole_end - piece_end);
    }
    if (hole < offsets[i]) {
      add(hole, offsets[i] - hole);
    }
    top = std::max(top, piece_end);
    to_free.emplace(piece.end, i);
  }
  return top;
}

PlanEvents::PlanEvents(const std::vector<PlanPiece>& pieces) {
  events_.reserve(2 * pieces.size());
  for (const PlanPiece& piece : pieces) {
    events_.push_back({piece.begin, true, piece.bytes});
    events_.push_back({piece.end, false, piece.bytes});
  }
  std::ranges::sort(events_, [](const Event& left, const Event& right) {
    return std::pair(left.when, left.begins) < std::pair(right.when, right.begins); // frees first
  });
}

std::size_t PlanEvents::peak(std::size_t largest) const {
  std::size_t live = 0, peak = 0;
  for (const Event& event : events_) {
    if (event.bytes <= largest) {
      live = event.begins ? live + event.bytes : live - event.bytes;
      peak = std::max(peak, live);
    }
  }
  return peak;
}

} // namespace torch_uvm
