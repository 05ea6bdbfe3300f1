// Free blocks, found by size. One index for each lane and size class.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>

#include "allocator/size_classes.h"
#include "runtime/location.h"

namespace torch_uvm {

struct Block;

/// Free blocks by size, then address. Nothing here allocates memory but make_entry.
class FreeIndex {
  struct Key {
    std::size_t bytes = 0;
    std::uintptr_t address = 0;
    Block* block = nullptr;

    // The block is not part of the order: an address has one block.
    friend bool operator<(const Key& left, const Key& right) {
      return left.bytes != right.bytes ? left.bytes < right.bytes : left.address < right.address;
    }
  };
  using Set = std::set<Key>;

 public:
  /// A block's place in an index; holds a node of the tree while the block is in none.
  class Entry {
    friend class FreeIndex;
    Set::node_type node_;
    Set::iterator position_;

   public:
    bool filed() const {
      return node_.empty();
    }
  };

  /// A node for a block, to be kept by it for good. \throws std::bad_alloc
  static Entry make_entry();

  void insert(Block* block) noexcept;
  void erase(Block* block) noexcept;
  /// A block in the index has changed its size or address, and keeps or changes its place.
  void update(Block* block) noexcept;

  /// The smallest block that has `bytes` at an aligned address, the lowest address among equals; nullptr: none. With
  /// an alignment above that of all blocks one somewhat larger may be found.
  Block* best_fit(std::size_t bytes, std::size_t alignment = kBlockAlignment) const noexcept;

  std::size_t size() const noexcept {
    return blocks_.size();
  }
  /// Whether the block is filed here, under what it says of itself.
  bool holds(const Block* block) const noexcept;

 private:
  Set blocks_;
};

/// Where a block belongs: the home its pages are at and the stream whose order it follows. Blocks of one
/// lane may be merged and reused with no event between them.
struct Lane {
  Location home;
  Stream stream;
  std::array<FreeIndex, kSizeClasses> free;
};

} // namespace torch_uvm
