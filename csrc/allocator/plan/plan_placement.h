// The two placement algorithms of a layout: best fit into gaps, in any order; and a sweep in order of time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_uvm {

/// A request to be placed.
struct PlanPiece {
  std::size_t bytes = 0; ///< rounded up to the alignment
  std::int32_t begin = 0;
  std::int32_t end = 0; ///< INT32_MAX: not freed within the iteration

  std::size_t alignment() const;
};

/// Size of the piece for a request.
std::size_t piece_bytes(std::size_t requested);

/// Places pieces one by one, in any order. Each goes into the smallest sufficient gap between the already placed pieces
/// whose lifetimes overlap its own, or above them. The pieces are in an unrolled list sorted by offset: a search
/// compares 64 lifetimes at a time and visits only the overlapping ones.
class GapPlacement {
 public:
  /// \return the offset
  std::size_t place(const PlanPiece& piece);
  std::size_t top() const {
    return top_;
  }

 private:
  static constexpr unsigned kChunk = 64;
  struct Chunk {
    Chunk();
    std::int32_t begin[kChunk], end[kChunk]; // unused entries overlap nothing
    std::size_t offset[kChunk], top[kChunk];
    unsigned count = 0;
  };
  /// A bit mask of the pieces in the chunk whose lifetimes overlap.
  static std::uint64_t overlapping(const Chunk& chunk, std::int32_t begin, std::int32_t end);
  void insert(const PlanPiece& piece, std::size_t offset);

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::size_t top_ = 0;
};

/// Places pieces in order of time, each into the smallest hole that is free at that time, as an online best-fit
/// allocator would.
/// \param pieces sorted by begin \param base lowest offset to use \param offsets output, one per piece
/// \return the end of the highest piece
std::size_t sweep(const std::vector<PlanPiece>& pieces, std::size_t base, std::vector<std::size_t>& offsets);

/// The allocations and frees of pieces, in order of time.
class PlanEvents {
 public:
  explicit PlanEvents(const std::vector<PlanPiece>& pieces);
  /// Peak live bytes of the pieces that have at most `largest` bytes.
  std::size_t peak(std::size_t largest) const;

 private:
  struct Event {
    std::int32_t when;
    bool begins;
    std::size_t bytes;
  };
  std::vector<Event> events_;
};

} // namespace torch_uvm
