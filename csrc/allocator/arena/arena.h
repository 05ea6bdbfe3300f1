// An arena: bump allocation from upstream blocks, released all at once. For allocations that live as long as an
// iteration or a scope within it.
//
// - Each stream has its own chain of blocks, so bump order is stream order and no event is needed. If other streams
//   used an allocation (record_stream), the reset or pop orders the reuse after them with one event per stream; if the
//   block is freed instead, the upstream is told of them.
// - The first block of a chain has `initial` bytes. Each further one is `growth` times as large, or as large as the
//   request if that is more. `reset` replaces several blocks by a single one, so that later iterations make no upstream
//   call.
// - Freeing an allocation only decrements a counter. Memory is reclaimed by `reset`, `pop` and `release`. Allocations
//   that are still live then stay valid and keep their memory, and `reset` and `pop` return their count. After a reset
//   they keep the whole block, which the last free returns to the upstream. After a pop they keep everything of the
//   scope that lies before them in their block.
// - Marks belong to the arena, not to a thread. A reset closes all open marks.
//
//   chain of a stream   | block: span of depth 0 | depth 1 | depth 2 -> |    the last block is bumped
//                       | block ...                                  |
//
// A span is the part of a block that was allocated between two consecutive marks. Its counters tell a pop what is still
// live.
//
// Lock order: `mutex_`, then the runtime's, then `bump_`. `mutex_` guards changes of chains, blocks, spans and marks,
// and is held while events are recorded and waited for. `bump_` is a spin lock for what the fast paths of allocate and
// free touch; it is taken last, for a few instructions. A chain that is being changed is closed: under `bump_` it
// appears to have no room. The upstream is called with neither lock held, because it may call a memory-pressure
// callback that frees allocations of this arena. Other threads that hold the callback's lock may free such allocations,
// too.
//
// Do not destroy a stream before the first reset or release after its allocations, and those recorded for it, were
// freed. A forked child does not own the memory: freeing does nothing and allocating throws.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "allocator/allocator.h"
#include "allocator/events.h"
#include "allocator/spin_lock.h"
#include "runtime/bytes.h"
#include "runtime/forks.h"

namespace torch_uvm {

struct ArenaOptions {
  Location home; ///< of all allocations
  std::size_t initial = 64 * MiB; ///< size of each stream's first block; at least 1
  double growth = 2.0; ///< size ratio of consecutive blocks of a chain; at least 1
};

/// Allocations that were still live at a reset or pop.
struct Outlived {
  std::int64_t allocations = 0;
  std::int64_t bytes = 0; ///< as requested

  bool operator==(const Outlived&) const = default;
};

class Arena final : public Allocator {
 public:
  using Mark = std::uint64_t; ///< never reused

  /// \throws InvalidArgument if upstream is null, the home does not exist, initial is 0, or growth is below 1
  Arena(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const ArenaOptions& options);
  ~Arena() override; ///< leaks blocks that are still in use

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  /// Frees the blocks without live allocations; needs no reset.
  std::size_t release() override;
  bool serves(Location home) const override {
    return home == options_.home;
  }
  AllocatorFigures figures() const override;
  std::string description() const override;

  /// Opens a nested scope.
  Mark push();
  /// Reclaims what was allocated since the push. \throws InvalidArgument if `mark` is not the innermost open one
  Outlived pop(Mark mark);
  /// Reclaims everything, for the next iteration.
  Outlived reset();

 private:
  struct Span;
  struct Chunk;
  struct Chain;
  class Ordering;
  using Chunks = std::vector<std::unique_ptr<Chunk>>;

  Allocation allocate_slowly(std::size_t bytes, std::size_t rounded, Stream stream);
  std::unique_ptr<Chunk> make_chunk(std::size_t bytes, std::size_t least, Stream stream);
  bool record(Span& span, Stream stream, std::vector<Stream>& larger) noexcept;
  bool in_forked_child() const noexcept;

  // Require `mutex_`:
  Chain& chain_of(Stream stream);
  Chunk* find_room(Chain& chain, std::size_t rounded);
  static Chunk& add(Chain& chain, std::unique_ptr<Chunk> chunk, std::size_t rounded);
  Allocation take(Chain& chain, Chunk& from, std::size_t bytes, std::size_t rounded);
  Span& span_in(Chunk& chunk);
  void close(Chain& chain) noexcept;
  void open(Chain& chain);
  Outlived outlived_since(const Chunk& chunk, std::size_t depth) const;
  void rewind(Chain& chain, std::size_t depth, Ordering& ordering);
  Outlived restart(Chain& chain, Ordering& ordering, Chunks& given_up);
  Outlived retire(std::unique_ptr<Chunk>& chunk) noexcept;
  static bool restart(Chunk& chunk, const Chain& chain, Ordering& ordering) noexcept;
  std::size_t grown(std::size_t bytes) const noexcept;

  // Require `bump_`:
  Chain* find(Stream stream) noexcept;
  void count(Span& span, std::size_t bytes) noexcept;

  ManagedRuntime& runtime_;
  const std::shared_ptr<Allocator> upstream_;
  const ArenaOptions options_;
  const int devices_;
  const ForkWatch forks_;

  mutable std::mutex mutex_;
  EventPool events_;
  std::vector<Mark> marks_; ///< innermost last
  Mark last_mark_ = 0;

  mutable SpinLock bump_;
  Chain* last_ = nullptr; ///< chain of the last allocation
  AllocatorFigures figures_;
  std::vector<std::unique_ptr<Chain>> chains_; ///< changed with both locks held; never shrinks
};

} // namespace torch_uvm
