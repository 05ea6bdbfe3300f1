// Chains, blocks and spans of an arena. arena.h says which lock guards what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "allocator/arena/arena.h"

namespace torch_uvm {

/// A part of a block that was allocated while no mark was pushed or popped. It is the handle of its allocations.
struct Arena::Span {
  Span(Chunk& chunk, std::size_t begin, std::size_t depth) : chunk(chunk), begin(begin), depth(depth) {}

  Chunk& chunk;
  const std::size_t begin; ///< offset in the block
  std::size_t depth; ///< open marks at allocation; reduced if one was popped while the span was in use
  // Guarded by `bump_`:
  std::int64_t allocations = 0; ///< live
  std::int64_t bytes = 0; ///< of the live allocations, as requested
  std::vector<Stream> others; ///< streams other than the chain's that used any of it
};

/// A block of upstream memory. The destructor frees it, and must run with no lock held.
struct Arena::Chunk {
  Chunk(Arena& arena, std::size_t bytes, Stream stream);
  ~Chunk();
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  bool in_use() const noexcept; ///< requires `bump_`
  std::size_t room() const {
    return memory.bytes - top;
  }

  Arena& arena;
  const Stream stream;
  const Allocation memory;
  std::size_t top = 0; ///< end of the used part; stale while the block is bumped
  std::vector<std::unique_ptr<Span>> spans; ///< by address
  bool retired = false; ///< guarded by `bump_`: removed from its chain; the last free deletes it
};

/// The blocks of one stream. While the chain is open, `span` is in the last block, and `room` is what is left of it.
struct Arena::Chain {
  explicit Chain(Stream stream, std::size_t next) : stream(stream), next(next) {}

  const Stream stream;
  // Guarded by `bump_`:
  Span* span = nullptr; ///< null: closed
  char* top = nullptr;
  std::size_t room = 0;
  // Guarded by `mutex_`:
  Chunks chunks; ///< in use; the last one is bumped
  Chunks spare; ///< empty, for reuse
  std::size_t next; ///< size of the next block
};

/// Orders the reuse of memory after other streams that used it. Exists for one reset or pop; one event per stream
/// serves all chains.
class Arena::Ordering {
 public:
  explicit Ordering(Arena& arena) : arena_(arena) {}
  ~Ordering();
  Ordering(const Ordering&) = delete;
  Ordering& operator=(const Ordering&) = delete;

  /// Orders future work of the chain after the work queued on the span's other streams.
  /// \return false if the runtime failed; the memory must not be reused then
  bool after(const Span& span, const Chain& chain) noexcept;

 private:
  struct Recorded {
    Stream stream;
    Event event; ///< null: the stream was idle
  };
  const Recorded& recorded(Stream stream);

  Arena& arena_;
  std::vector<Recorded> recorded_;
};

} // namespace torch_uvm
