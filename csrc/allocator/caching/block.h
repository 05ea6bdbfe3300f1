// Blocks and segments, as the allocator keeps them, and the index of free blocks: one for each lane and size class.
// What may be done to them is in heap.h.
//
//   segment  |<------------------------- bytes ------------------------->|
//   blocks   | allocated |  free, lane A  | pending |  free, lane B      |     before <-> after
//
// Blocks tile their segment. A block is filed in the free index of its lane exactly while it is free.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "allocator/events.h"
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

struct Segment {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  Location home; ///< the home it was made for
  SizeClass size_class = SizeClass::kSmall;
  Block* first = nullptr;
  std::size_t used = 0; ///< blocks that are not free
  std::uint64_t unused_since = 0; ///< of the heap's clock; with no block in use
  Segment* unused_before = nullptr; ///< neighbours among those of its home with no block in use, oldest first
  Segment* unused_after = nullptr;
};

/// An event that blocks wait for, shared by as many as it serves: those freed in a batch, or the pieces of one. Under
/// the allocator's mutex, like the pool that it goes back to.
struct Readiness {
  Readiness(EventPool& pool, Stream stream, Event event) : pool(pool), stream(stream), event(event) {}
  ~Readiness() {
    pool.give(stream, event);
  }
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  EventPool& pool;
  Stream stream;
  Event event;
};

/// Work on a stream that may still touch a block, besides what the stream of its lane has queued.
struct Use {
  Stream stream;
  std::shared_ptr<const Readiness> event; ///< recorded after the block was freed; none: not yet, or the runtime failed
};

enum class BlockState : std::uint8_t {
  kFree, ///< filed
  kReserved, ///< taken out for a request that still waits for older work
  kAllocated, ///< in a caller's hands
  kPending, ///< freed; `uses` are still waited for
};

struct Block {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  std::size_t requested = 0; ///< 0 while free or reserved
  Segment* segment = nullptr;
  Block* before = nullptr; ///< neighbours by address, within the segment
  Block* after = nullptr; ///< in a pool of unused blocks: the next one
  Lane* lane = nullptr; ///< home, and the stream whose order it follows
  BlockState state = BlockState::kFree;
  bool read_by_host = false; ///< its home is, or was since it was handed out, the host
  FreeIndex::Entry entry; ///< its place in the free index, made beforehand: filing cannot fail
  std::vector<Use> uses;
  /// While free: the one thing to wait for. None: what the lane's stream had queued when it was filed.
  std::shared_ptr<const Readiness> ready;
  std::uint64_t freed_at = 0; ///< while free, of the heap's clock: of its latest piece
  std::atomic<void*> tag = nullptr; ///< of the owner, which reads it with no lock before it frees the block
  Block* pending_before = nullptr; ///< neighbours in the list of pending blocks
  Block* pending_after = nullptr;
};

/// Blocks are recycled, never given back one by one: making one costs two calls of malloc.
class BlockPool {
 public:
  BlockPool() = default;
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// \throws std::bad_alloc
  Block* take() {
    if (unused_ == nullptr) {
      grow();
    }
    Block* const block = unused_;
    unused_ = block->after;
    return block;
  }

  void give(Block* block) noexcept {
    block->ready.reset();
    block->state = BlockState::kFree; // merged into a neighbour or not: who frees it again is found out
    block->after = unused_;
    unused_ = block;
  }

 private:
  void grow();

  std::vector<std::unique_ptr<Block[]>> slabs_;
  Block* unused_ = nullptr;
};

} // namespace torch_uvm
