// Address ranges of the emulated runtime: real addresses, into which real memory is mapped.
//
// Pieces are parts of one anonymous file, so that a piece can be mapped at several addresses. A range without a piece
// is inaccessible: an access that should not happen ends the program.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "runtime/emulated/emulated_runtime.h"
#include "runtime/host_memory.h"

namespace torch_uvm {

/// The runtime's mutex guards it: functions of AddressRanges take it, the others are called with it held.
class EmulatedRuntime::Ranges final : public AddressRanges {
 public:
  explicit Ranges(State& state) : state_(state) {}
  ~Ranges() override;

  std::size_t granularity(int device) const override;
  void* reserve(std::size_t bytes, int device) override;
  void release(void* range, std::size_t bytes) noexcept override;
  Piece allocate_piece(std::size_t bytes, int device) override;
  void free_piece(Piece piece) noexcept override;
  void map(void* range, Piece piece, int device) override;
  void unmap(void* range, Piece piece) override;

  /// The range that contains an address.
  struct Place {
    std::uintptr_t end = 0;
    int device = -1; ///< of the range
    bool is_mapped = false;
    int memory = -1; ///< device of the piece, if one is mapped
  };
  std::optional<Place> find(const void* ptr) const;
  /// Bytes of all pieces.
  std::size_t piece_bytes() const {
    return piece_bytes_;
  }
  /// The number of ranges and pieces.
  std::size_t live() const {
    return ranges_.size() + pieces_.size();
  }

 private:
  using Number = std::uintptr_t; ///< of a piece: its handle; 0: none

  struct Memory {
    std::uint64_t offset = 0; ///< in the file
    std::size_t bytes = 0;
    int device = -1;
    std::size_t mappings = 0;
    bool released = false; ///< goes with its last mapping
  };
  struct Range {
    std::size_t bytes = 0;
    int device = -1;
    Number piece = 0;
  };
  void check(const char* what, std::size_t bytes, int device) const;
  Range& range_at(void* range, std::size_t bytes);
  Memory& memory_of(Piece piece);
  void drop_if_unused(Number number) noexcept;
  /// What the pages of a host piece add to the cost of a call; 0 for a device's.
  static double host_pages_us(const Memory& memory, double rate);

  State& state_;
  MemoryFile file_;
  std::map<std::uintptr_t, Range> ranges_; ///< by address
  std::map<Number, Memory> pieces_;
  Number next_ = 1;
  std::size_t piece_bytes_ = 0;
};

} // namespace torch_uvm
