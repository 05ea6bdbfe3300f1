// Copies of managed memory for a forked child, made before the fork.
//
//   parent   | segment: not inherited by children              |      copy of P
//                         [ P: pages of a block read by the host ]
//   child    | hole        [ the copy, remapped to P ]          hole |
//
// The copy is ordinary memory, so parent and child share its pages (copy-on-write) until one of them writes. The parent
// drops it immediately. The parent pays for one copy of what the host may read; the child pays nothing.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/host_memory.h"

namespace torch_uvm {

class ForkCopies {
 public:
  ForkCopies() = default;
  ForkCopies(const ForkCopies&) = delete;
  ForkCopies& operator=(const ForkCopies&) = delete;

  /// Plans a copy of the pages that a range touches, limited to the pages of `segment` that a child does not inherit.
  /// Call in address order: ranges on the same pages are merged.
  void plan(AddressRange range, AddressRange segment) noexcept;
  bool empty() const noexcept {
    return copies_.empty();
  }

  /// Makes the planned copies in address order, up to `available` bytes.
  void make(std::size_t available) noexcept;

  void drop() noexcept; ///< in the parent
  void move_into_place() noexcept; ///< in the child

 private:
  struct Copy {
    AddressRange pages;
    void* copy = nullptr; ///< null: no memory was available for it
  };
  /// Writes one line to stderr if `bytes` is not 0.
  void report(std::size_t bytes, const char* why) const noexcept;
  void forget() noexcept;

  std::vector<Copy> copies_;
  std::size_t unplanned_ = 0; ///< bytes of copies that could not be planned for lack of memory
};

} // namespace torch_uvm
