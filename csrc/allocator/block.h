// Blocks and segments, as the allocator keeps them. What may be done to them is in heap.h.
//
//   segment  |<------------------------- bytes ------------------------->|
//   blocks   | allocated |  free, lane A  | pending |  free, lane B      |     before <-> after
//
// Blocks tile their segment. A block is filed in the free index of its lane exactly while it is free.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/events.h"
#include "allocator/free_index.h"
#include "allocator/size_classes.h"
#include "runtime/location.h"

namespace torch_uvm {

struct Segment {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  Location home; ///< the home it was made for
  SizeClass size_class = SizeClass::kSmall;
  Block* first = nullptr;
  std::size_t used = 0; ///< blocks that are not free
};

/// Work on a stream that may still touch a block, besides what the stream of its lane has queued.
struct Use {
  Stream stream;
  Event event; ///< recorded when the block was freed; none: not freed yet, or the runtime failed
};

/// The one thing that a free block has to wait for, instead of all that its stream has queued. Shared by the pieces
/// of what was freed with it. Under the allocator's mutex, like the pool that it goes back to.
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
  std::shared_ptr<const Readiness> ready; ///< while free; none: once the lane's stream has done what it has queued
  void* tag = nullptr; ///< of whoever has it; freeing reads the line of `uses` anyway
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
