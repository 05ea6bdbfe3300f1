// What a forked child may read of its parent's managed memory: copies, made aside before the fork.
//
//   parent   | segment: kept from children                      |      copy of P
//                         [ P: pages of a block read by the host ]
//   child    | hole        [ the copy, moved to P's address ]   hole |
//
// The copy is ordinary memory, so parent and child share its pages until one of them writes; the parent
// drops it at once. A fork costs one copy of what the host may read, and the child none.
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

  /// Plans a copy of the pages that a range touches, as far as they are among those of `segment` that a
  /// child lacks. In address order: ranges on the same pages become one.
  void plan(AddressRange range, AddressRange segment) noexcept;
  bool empty() const noexcept {
    return copies_.empty();
  }

  /// Copies what is planned, in address order, as far as `available` bytes hold it.
  void make(std::size_t available) noexcept;

  void drop() noexcept; ///< in the parent
  void move_into_place() noexcept; ///< in the child

 private:
  struct Copy {
    AddressRange pages;
    void* copy = nullptr; ///< none: there was no memory for it
  };
  /// One line on stderr, if there is anything to say.
  void report(std::size_t bytes, const char* why) const noexcept;
  void forget() noexcept;

  std::vector<Copy> copies_;
  std::size_t unplanned_ = 0; ///< bytes that there was no memory to plan for
};

} // namespace torch_uvm
