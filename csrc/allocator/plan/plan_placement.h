// The two ways in which a layout places requests: by size into gaps, and in the order of events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace torch_uvm {

/// A request on its way into a layout.
struct PlanPiece {
  std::size_t bytes = 0; ///< rounded up to its alignment
  std::int32_t begin = 0;
  std::int32_t end = 0; ///< the largest number: lives on

  std::size_t alignment() const;
};

/// The bytes that a request takes.
std::size_t piece_bytes(std::size_t requested);

/// Pieces placed one after the other, in any order of time: each into the smallest gap that holds it between those
/// whose lives overlap its own, or above them. An unrolled list by offset, in which a search compares 64 lives at once
/// and looks closer only where one overlaps.
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
    std::int32_t begin[kChunk], end[kChunk]; // those of unused places overlap nothing
    std::size_t offset[kChunk], top[kChunk];
    unsigned count = 0;
  };
  /// A bit for each piece of the chunk whose life overlaps.
  static std::uint64_t overlapping(const Chunk& chunk, std::int32_t begin, std::int32_t end);
  void insert(const PlanPiece& piece, std::size_t offset);

  std::vector<std::unique_ptr<Chunk>> chunks_;
  std::size_t top_ = 0;
};

/// All pieces in the order of time, each into the smallest hole that is free by then: what an allocator does that does
/// not know what comes.
/// \param pieces by begin \param base where they start \param offsets of each piece, filled in
/// \return their top
std::size_t sweep(const std::vector<PlanPiece>& pieces, std::size_t base, std::vector<std::size_t>& offsets);

/// The order in which pieces come and go.
class PlanEvents {
 public:
  explicit PlanEvents(const std::vector<PlanPiece>& pieces);
  /// The most bytes of pieces that live at once, of those that have at most `largest` bytes.
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
