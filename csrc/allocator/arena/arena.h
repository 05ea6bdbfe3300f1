// An arena: bump allocation from blocks of an upstream, given up all at once. For what lives as long as an iteration,
// or as a scope within one.
//
// - Every stream has a chain of blocks of its own, so that the order of bumps is the stream's order, and no event is
//   needed. Other streams that used an allocation (record_stream) are waited for when its memory is used again, or by
//   the upstream: one event each, at the reset or pop.
// - A block is `initial` bytes, the next one of its chain `growth` times as much, and as much as one request if that is
//   more. `reset` makes one block out of several, so that from the second iteration on there is no call of the
//   upstream.
// - Freeing an allocation counts down. Memory comes back by `reset`, `pop` and `release`. What is still in a caller's
//   hands then stays valid, keeps its memory, and is counted in what they return: after a reset the whole block is its
//   own (the last free gives it back to the upstream), after a pop all of the scope that lies before it in its block.
// - Marks are the arena's, not a thread's. A reset closes those that are open.
//
//   chain of a stream   | block: span of depth 0 | depth 1 | depth 2 -> |    the last block is bumped
//                       | block ...                                  |
//
// A span is what was allocated in one block between a mark and the next one: with it a pop knows what is still in use.
//
// Locks: `mutex_` is held by whatever changes chains, blocks, spans and marks, and while events are recorded and
// waited for, so it comes before the runtime's. `bump_` guards what an allocation or a free of the common kind touches:
// it is taken last, for some instructions. A chain that is being changed is closed, which `bump_` sees as no room.
// The upstream is called with neither held: it may call a door, which may free allocations of this arena, and so may
// others meanwhile, who hold the door's lock.
//
// Streams outlive what was allocated for them, or recorded, until the reset or release after it was freed. In a forked
// child, whose memory this is not, freeing does nothing and allocating throws.
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

namespace torch_uvm {

struct ArenaOptions {
  Location home; ///< of all that it allocates
  std::size_t initial = 64 * MiB; ///< bytes of the first block of each stream; at least 1
  double growth = 2.0; ///< of each block to the one before it in its chain; at least 1
};

/// Allocations in callers' hands that a reset or a pop would have given up.
struct Outlived {
  std::int64_t allocations = 0;
  std::int64_t bytes = 0; ///< as asked for

  bool operator==(const Outlived&) const = default;
};

class Arena final : public Allocator {
 public:
  using Mark = std::uint64_t; ///< never the same twice

  /// \throws InvalidArgument for no upstream, a home that does not exist, no initial bytes, a growth below 1
  Arena(ManagedRuntime& runtime, std::shared_ptr<Allocator> upstream, const ArenaOptions& options);
  ~Arena() override; ///< a block in use, after all, is leaked

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override;
  void free(const Allocation& allocation) noexcept override;
  void record_stream(const Allocation& allocation, Stream stream) override;
  /// Blocks that nobody has an allocation in, a reset or not.
  std::size_t release() override;
  bool serves(Location home) const override {
    return home == options_.home;
  }
  AllocatorFigures figures() const override;
  std::string description() const override;

  /// Begins a scope within those that are open.
  Mark push();
  /// Gives up what was allocated since its push. \throws InvalidArgument for a mark that is not the innermost open one
  Outlived pop(Mark mark);
  /// Gives up everything: the next iteration begins.
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

  // With `mutex_` held:
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

  // With `bump_` held:
  Chain* find(Stream stream) noexcept;
  void count(Span& span, std::size_t bytes) noexcept;

  ManagedRuntime& runtime_;
  const std::shared_ptr<Allocator> upstream_;
  const ArenaOptions options_;
  const int devices_;
  const unsigned born_; ///< forks that had been by then

  mutable std::mutex mutex_;
  EventPool events_;
  std::vector<Mark> marks_; ///< open, innermost last
  Mark last_mark_ = 0;

  mutable SpinLock bump_;
  Chain* last_ = nullptr; ///< of the last allocation
  AllocatorFigures figures_;
  std::vector<std::unique_ptr<Chain>> chains_; ///< changed with both locks held; never erased
};

} // namespace torch_uvm
