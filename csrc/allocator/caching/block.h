// Blocks, segments and the index of free blocks (one per free list and size class). heap.h has the operations on them.
//
//   segment  |<------------------------- bytes ------------------------->|
//   blocks   | allocated |  free, list A  | pending |  free, list B      |     before <-> after
//
// Blocks tile their segment. A block is in the free index of its list if and only if it is free.
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

/// Free blocks by size, then address. Only make_entry allocates memory.
class FreeIndex {
  struct Key {
    std::size_t bytes = 0;
    std::uintptr_t address = 0;
    Block* block = nullptr;

    // Addresses are unique, so the block itself is not compared.
    friend bool operator<(const Key& left, const Key& right) {
      return left.bytes != right.bytes ? left.bytes < right.bytes : left.address < right.address;
    }
  };
  using Set = std::set<Key>;

 public:
  /// A block's position in an index. Owns the tree node while the block is in no index.
  class Entry {
    friend class FreeIndex;
    Set::node_type node_;
    Set::iterator position_;

   public:
    bool filed() const {
      return node_.empty();
    }
  };

  /// A node for a block, which keeps it for its lifetime. \throws std::bad_alloc
  static Entry make_entry();

  void insert(Block* block) noexcept;
  void erase(Block* block) noexcept;
  /// Restores the order after a block in the index has changed its size or address.
  void update(Block* block) noexcept;

  /// The smallest block that has `bytes` at an aligned address, at the lowest address among equals; nullptr if there is
  /// none. With an alignment above kBlockAlignment, the result may be somewhat larger than the smallest.
  Block* best_fit(std::size_t bytes, std::size_t alignment) const noexcept;

  /// The block of at least `bytes` at the lowest address; nullptr if there is none. Looks at all that are large enough.
  Block* lowest_fit(std::size_t bytes) const noexcept;

  std::size_t largest() const noexcept {
    return blocks_.empty() ? 0 : blocks_.rbegin()->bytes;
  }

  template <typename Tell>
  void each(const Tell& tell) const {
    for (const Key& key : blocks_) {
      tell(key.block);
    }
  }
  std::size_t size() const noexcept {
    return blocks_.size();
  }
  /// Whether the block is in this index under its current size and address.
  bool holds(const Block* block) const noexcept;

 private:
  Set blocks_;
};

/// Per-stream free list: the home of a block's pages and the stream whose order it follows. Blocks of one list may be
/// merged and reused with no event between them.
struct FreeList {
  Location home;
  Stream stream;
  std::array<FreeIndex, kSizeClasses> free;
};

/// An event that blocks wait for. Shared by all blocks it covers: those freed in a batch, or the pieces of a split
/// block. Guarded by the allocator's mutex, like the pool that it returns to.
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

struct Segment {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  Location home; ///< the home it was made for
  SizeClass size_class = SizeClass::kSmall;
  Block* first = nullptr;
  std::size_t used = 0; ///< blocks that are not free
  std::uint64_t unused_since = 0; ///< in ticks of the heap's clock; valid while no block is in use
};

/// Work that may still touch a block, on a stream other than its free list's.
struct Use {
  Stream stream;
  /// Recorded after the block was freed; null: not yet recorded, or the runtime failed.
  std::shared_ptr<const Readiness> event;
};

enum class BlockState : std::uint8_t {
  kFree, ///< in the free index
  kReserved, ///< neither free nor owned: for a request that waits for earlier work, or being relocated
  kAllocated, ///< owned by a caller
  kPending, ///< freed, but still waits for `uses`
};

struct alignas(64) Block {
  // What every search for room reads, of thousands of blocks: in one line of a processor's cache.
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  std::size_t requested = 0; ///< 0 while free, or reserved for a request; a block being relocated keeps it
  Block* before = nullptr; ///< neighbours by address, within the segment
  Block* after = nullptr; ///< in BlockPool: the next unused block
  FreeList* free_list = nullptr; ///< home, and the stream whose order the block follows
  std::atomic<void*> tag = nullptr; ///< the owner's pointer, which it reads without a lock before it frees the block
  BlockState state = BlockState::kFree;
  bool idle = false; ///< being freed: no queued work touches it
  bool read_by_host = false; ///< its home is the host, or was at any time since it was allocated

  Segment* segment = nullptr;
  FreeIndex::Entry entry; ///< its place in the free index; allocated in advance, so filing cannot fail
  std::vector<Use> uses;
  /// While free: the only event to wait for. Null: wait for the work queued on the free list's stream when the block
  /// was filed.
  std::shared_ptr<const Readiness> ready;
  /// While free: when its most recently freed piece was filed, in ticks of the heap's clock. Idle pieces do not count;
  /// 0: all are.
  std::uint64_t freed_at = 0;
  Block* pending_before = nullptr; ///< list of pending blocks
  Block* pending_after = nullptr;
};

/// Recycles blocks and never frees one: creating a block costs two calls of malloc.
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
    // So that a double free is detected even after the block was merged into a neighbour.
    block->state = BlockState::kFree;
    block->after = unused_;
    unused_ = block;
  }

 private:
  void grow();

  std::vector<std::unique_ptr<Block[]>> slabs_;
  Block* unused_ = nullptr;
};

} // namespace torch_uvm
