// What an arena is made of: chains, their blocks, and spans of these. What guards which field is in arena.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/arena/arena.h"

namespace torch_uvm {

/// What was allocated in a block while no mark was pushed or popped. Allocations have it as their handle.
struct Arena::Span {
  Span(Chunk& chunk, std::size_t begin, std::size_t depth) : chunk(chunk), begin(begin), depth(depth) {}

  Chunk& chunk;
  const std::size_t begin; ///< offset in the block
  std::size_t depth; ///< marks that were open; fewer, once one of them was popped and this could not go
  // Under `bump_`:
  std::int64_t allocations = 0; ///< in callers' hands
  std::int64_t bytes = 0; ///< of these, as asked for
  std::vector<Stream> others; ///< that used any of it, besides the chain's
};

/// A block: memory of the upstream, given back by the destructor, which is run with no lock held.
struct Arena::Chunk {
  Chunk(Arena& arena, std::size_t bytes, Stream stream);
  ~Chunk();
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  bool in_use() const noexcept; ///< with `bump_` held
  std::size_t room() const {
    return memory.bytes - top;
  }

  Arena& arena;
  const Stream stream;
  const Allocation memory;
  std::size_t top = 0; ///< bytes from its start that are taken; out of date while it is bumped
  std::vector<std::unique_ptr<Span>> spans; ///< in the order of addresses
  bool retired = false; ///< under `bump_`: of no chain any more, deleted by the last free
};

/// The blocks of one stream. Open: `span` is in the last block, which ends where the room does.
struct Arena::Chain {
  explicit Chain(Stream stream, std::size_t next) : stream(stream), next(next) {}

  const Stream stream;
  // Under `bump_`:
  Span* span = nullptr; ///< closed: none
  char* top = nullptr;
  std::size_t room = 0;
  // Under `mutex_`:
  Chunks chunks; ///< in use; the last one is bumped
  Chunks spare; ///< no longer in use
  std::size_t next; ///< bytes of the next block
};

/// What makes memory wait for other streams that used it, for the length of one reset or pop: a stream's event serves
/// all chains.
class Arena::Ordering {
 public:
  explicit Ordering(Arena& arena) : arena_(arena) {}
  ~Ordering();
  Ordering(const Ordering&) = delete;
  Ordering& operator=(const Ordering&) = delete;

  /// Work that comes next in the chain is done after what the others of the span have queued.
  /// \return false: the runtime has failed, and the memory may not be used again
  bool after(const Span& span, const Chain& chain) noexcept;

 private:
  struct Recorded {
    Stream stream;
    Event event; ///< none: it was idle
  };
  const Recorded& recorded(Stream stream);

  Arena& arena_;
  std::vector<Recorded> recorded_;
};

} // namespace torch_uvm
