// A caching allocator for managed memory, one for the host and all devices.
//
// - A segment is what the source gave us; a block is a piece of it that a caller has, or a free piece.
//   Both have a home: the device, or the host, that uses them first. Small requests share segments of
//   their home, and so do the others but for very large ones, which grow with what there is; large ones start on and
//   fill 2 MiB pages where that wastes little.
// - A free block is filed under the home where its pages are *now* and under the stream that used it
//   last. Best fit, split, coalesce: a request takes the smallest free block that holds it, lowest
//   address first.
// - Stream-ordered: a block freed on a stream is at once reusable on that stream, with no event. An
//   event is recorded only when somebody needs one: a second stream that used the block
//   (record_stream), another stream that takes it, or the host that takes a block which device work
//   may still touch; then the host waits before it gets the block. It serves all that was freed before
//   it: blocks that go to another stream in a batch, and blocks that streams were recorded for and that
//   were freed since the last allocation. A caller that has an event of its own hands it in (free_after).
// - Another stream's block is taken only when nothing of the stream's own fits, and before a new segment
//   is made. Neighbours are merged only if they are filed alike; under failure whatever their filing is.
// - A fresh segment homed on a device is populated by one prefetch. One that fails is counted and
//   forgotten: it is a hint, and its pages come by fault instead.
// - Under failure: wait for pending frees, give back cached segments, ask the door to make room, try
//   again, and only then raise OutOfMemory with a table of where the bytes are.
// - A device may have a cap on the segments made for it. Where the cap refuses, what is free already is merged and
//   cached segments are given back, then the door is asked, and only then the host waits.
//
// Streams outlive the blocks that are filed under them, or were recorded for them: before a stream is
// destroyed, these blocks are freed and empty_cache is called.
//
// Lock order: this allocator's mutex, then the runtime's. The door is called with no lock held, and so
// are the source for a new segment, its prefetch, and the host's wait for one block. The failure path and
// empty_cache hold the mutex while they wait for pending blocks and give segments back: what they have
// found must stay. No Python is called and no GIL is taken here; callers may or may not hold it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/segment_source.h"
#include "allocator/size_classes.h"
#include "allocator/statistics.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Tunables of the policy; the option table (config/options.h) reads and prints them.
struct AllocatorOptions {
  bool populate = true; ///< prefetch a fresh segment to its device
  std::optional<std::size_t> max_split_bytes =
      std::nullopt; ///< blocks larger than this are never split; at least 20 MiB
  /// The least and the most bytes of a segment that medium and large requests share: an eighth of what the home has
  /// reserved in between. A larger request has one of its own. No least, or not managed: large requests always have.
  std::optional<std::size_t> segment_min_bytes = kSegmentMin;
  std::size_t segment_max_bytes = kSegmentMax;
  std::size_t roundup_power2_divisions = 0; ///< sizes go by steps of 1/n of a power of two; 0: as they are
  /// Bytes of segments with no block in use that a home keeps; with more, the next free or allocation gives back those
  /// unused for longest whose work is done. None: all are kept.
  std::optional<std::size_t> release_threshold = std::nullopt;
  /// With more than this share of the limit (of a device with a cap, of that) reserved, an allocation that would need a
  /// new segment first gives back segments unused for longer than the average. None: never. More than 0, at most 1.
  std::optional<double> garbage_collection_threshold = std::nullopt;
};

/// What the residency floor gives the allocator to call when memory runs short.
class RoomMaker {
 public:
  virtual ~RoomMaker() = default;
  /// Frees `bytes` in one piece, for a block of `home` that `stream` will use first. True: it is worth trying
  /// again. Called again, some times, while that is not enough: another thread may have been faster.
  virtual bool make_room(std::size_t bytes, Location home, Stream stream) = 0;
  /// When there is no room, and nothing more to wait for: whether a hard cap is exceeded this once, for what a
  /// running operator cannot do without.
  virtual bool may_exceed(std::size_t /*bytes*/, Location /*home*/) {
    return false;
  }
  /// Why a request is refused, for the error's message: sentences, a line each with its end; empty: nothing to add.
  virtual std::string explain(std::size_t /*bytes*/, Location /*home*/) noexcept {
    return {};
  }
};

class AllocationObserver; // allocator/allocation_observer.h

struct Block; // defined in allocator/caching/block.h; callers hold it as a handle

/// One piece of a segment, as `snapshot` reports it, in address order.
struct BlockInfo {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  std::size_t requested_bytes = 0; ///< 0 for a free piece
  enum class State { kAllocated, kPendingFree, kFree } state = State::kFree;
  Location home;
  Stream stream;
};

struct SegmentInfo {
  std::uintptr_t address = 0;
  std::size_t bytes = 0;
  Location home; ///< the home it was made for
  PoolKind kind = PoolKind::kSmall;
  std::size_t allocated_bytes = 0;
  std::size_t active_bytes = 0;
  std::size_t requested_bytes = 0;
  std::vector<BlockInfo> blocks;
};

/// Thread-safe. Outlives every block; process-wide instances are leaked on purpose, because libraries
/// free static workspaces at exit.
class CachingManagedAllocator {
 public:
  /// \throws InvalidArgument for options that set_options refuses
  CachingManagedAllocator(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source,
                          AllocatorOptions options = {});
  ~CachingManagedAllocator(); ///< gives every segment back; one with a block in use, after all, is leaked
  CachingManagedAllocator(const CachingManagedAllocator&) = delete;
  CachingManagedAllocator& operator=(const CachingManagedAllocator&) = delete;

  /// A block of at least `bytes` for use on `stream`; 512-byte aligned.
  /// \param bytes 0 gives nullptr: there is nothing to point at
  /// \param home where it will be used first
  /// \param stream the stream that will use it first; Stream::host() when home is the host
  /// \throws OutOfMemory with a table of where the bytes are; InvalidArgument for an unknown home or
  ///         stream; RuntimeFailure where a runtime call failed, and in a forked child. Nothing has changed
  Block* allocate(std::size_t bytes, Location home, Stream stream);

  /// As allocate, but gives up where room would have to be made, and returns nullptr: it never calls the door, never
  /// makes the host wait, never exceeds a cap, and raises nothing for want of memory. It may give back cached
  /// segments of that device to stay under its cap, while no stream that a block of the device follows is busy.
  /// \throws InvalidArgument and RuntimeFailure as allocate does
  Block* try_allocate(std::size_t bytes, Location home, Stream stream);

  /// Gives a block back, in the order of the stream it belongs to. Never throws: a runtime that fails
  /// here costs a block (it stays pending until empty_cache), not the program. nullptr is ignored; a
  /// block that is freed already, and not in use again, aborts the program, as it does in malloc.
  void free(Block* block) noexcept;

  /// As free, but of a block that may be used again once `ready` is reached, whatever else its stream has queued.
  /// \param ready recorded on a stream of the block's device, after all work that touches it; the allocator's from now
  /// on
  void free_after(Block* block, Event ready, Stream stream) noexcept;
  // Events to hand in there, recorded on `stream` now: from the allocator's own, to which they come back by
  // `free_after` or, where they turn out not to be needed, by `give_event`. \throws what the runtime throws
  Event record_event(Stream stream);
  void give_event(Stream stream, Event event) noexcept;

  /// Says that `stream`, too, uses the block: it is not reused before the work queued there at the
  /// time of `free` is done. The host's own work needs no record. \throws InvalidArgument
  void record_stream(Block* block, Stream stream);

  /// Says that the block's pages have moved: it belongs to `home` and `stream` from now on, and will be
  /// filed there when it is freed. Work queued on the stream it had is still waited for.
  /// \throws InvalidArgument, also for a new home of memory that cannot move
  void set_home(Block* block, Location home, Stream stream);

  /// The block is filed under `stream` from now on, with no event: the caller has made `stream` wait for all work
  /// that touches it, that of streams recorded before included. \throws InvalidArgument
  void hand_over(Block* block, Stream stream);

  // A pointer of the floor above, which the allocator only passes on: nullptr at first, and again once the block is
  // freed. No lock is taken: the owner of the block calls these. A tag is set under a lock that the callers of
  // cheapest_run, lowest_run and vacate hold, too, or by `vacate` once the owner has agreed.
  void set_tag(Block* block, void* tag) noexcept;
  void* tag(const Block* block) const noexcept;

  /// The block that a caller has and that holds this address; nullptr if there is none. Walks the blocks
  /// of one segment, up to some thousand small ones: not for every operator.
  Block* find(const void* ptr) const;

  // Of a block that the caller has. The first three take no lock and accept nullptr, which has address
  // nullptr and 0 bytes; home and stream throw InvalidArgument for it. Of a moved block, they are the new ones.
  void* data(const Block* block) const;
  std::size_t bytes(const Block* block) const; ///< of the block, after rounding
  std::size_t requested_bytes(const Block* block) const;
  Location home(const Block* block) const;
  Stream stream(const Block* block) const;
  /// Every stream whose queued work may touch the block: its own unless that is the host's, and those recorded.
  std::vector<Stream> streams(const Block* block) const;

  /// Gives back every segment that no block is in use of, after waiting for pending frees.
  /// \return bytes given back; 0 in a forked child
  /// \throws RuntimeFailure where the wait failed: what was waited for until then is cached
  std::size_t empty_cache();

  // Of one home, or of all together: peaks of the sum, not sums of peaks. \throws InvalidArgument
  Statistics statistics(std::optional<Location> home = std::nullopt) const;
  Levels levels(std::optional<Location> home = std::nullopt) const;
  void reset_peak_statistics(std::optional<Location> home = std::nullopt);
  void reset_accumulated_statistics(std::optional<Location> home = std::nullopt);

  std::vector<SegmentInfo> snapshot() const; ///< of one moment, by address

  /// The most bytes of segments made for a device (its budget); nullopt: no cap. What is reserved above it already
  /// stays; caches are given back to get there, after waiting for pending frees.
  /// Where the cap was exceeded, setting it again gives back what is free by then.
  /// \param hard when nothing more can be freed, allocate asks the door whether it may exceed the cap, and raises
  ///        OutOfMemory if it says no; else the cap is exceeded (within the limit), which num_over_cap counts
  /// \throws InvalidArgument; RuntimeFailure where the wait failed: the cap is set
  void set_cap(int device, std::optional<std::size_t> bytes, bool hard);
  std::optional<std::size_t> cap(int device) const; ///< \throws InvalidArgument

  /// The cheapest neighbouring blocks of a device's segments whose giving up leaves `bytes` in one piece: the tags of
  /// those that are allocated, lowest address first. Where no segment can hold them, all the blocks of the cheapest
  /// segments whose giving back leaves room for a new one. Among equals, the fewest allocated bytes, then pending, then
  /// in all.
  /// \param cost called under the allocator's mutex, once for each allocated block, with its tag (maybe null) and its
  ///        bytes; at least 0. Infinity: the block must stay. Free and pending blocks cost nothing
  /// \return nullopt: there is no such run; an empty vector: it is free already, or once pending frees are waited for
  /// \throws InvalidArgument; what `cost` throws
  std::optional<std::vector<void*>> cheapest_run(std::size_t bytes, int device,
                                                 const std::function<double(void* tag, std::size_t bytes)>& cost) const;
  /// As cheapest_run, of those neighbours that have the lowest address, whatever they cost; in no new segment.
  std::optional<std::vector<void*>> lowest_run(std::size_t bytes, int device,
                                               const std::function<double(void*, std::size_t)>& cost) const;

  /// A block that is to make way: its owner gets another one, of the device too, for it.
  struct Move {
    void* tag = nullptr; ///< of the owner
    Block* from = nullptr;
    Block* to = nullptr;
    Stream earlier; ///< whose order the place that it leaves has followed
    bool recorded = false; ///< the stream that it is filed under now had been recorded for it
  };
  /// Chooses neighbouring blocks of a segment whose leaving gives `bytes` in one piece, the cheapest that free memory
  /// elsewhere on the device can hold, and takes places for them there, filed under `stream`. Each move is to be
  /// concluded: by `leave` once the bytes have been copied, or by `stay`. Until then `from` is nobody's. No wait of
  /// the host, no new segment.
  /// \param cost as in cheapest_run, of moving a block
  /// \param claim called under the allocator's mutex, with the tag of each block that is chosen, before anything
  ///        changes. true: the owner does not free the block until the move is concluded. false: other blocks are tried
  /// \return empty: nothing has to move, or it cannot be done
  /// \throws InvalidArgument; RuntimeFailure; what `cost` and `claim` throw. Nothing has changed
  std::vector<Move> vacate(std::size_t bytes, int device, Stream stream,
                           const std::function<double(void* tag, std::size_t bytes)>& cost,
                           const std::function<bool(void* tag)>& claim);
  /// The place that it leaves is free, filed as the new one: that stream comes after all work that touches it.
  void leave(const Move& move) noexcept;
  /// The owner keeps `from`, with its tag, after all.
  void stay(const Move& move) noexcept;

  struct AllocatedPeak {
    std::size_t most = 0; ///< bytes allocated at once since the last call
    std::size_t now = 0;
    std::uint64_t changes = 0; ///< see allocation_changes
  };
  /// Of a device. \throws InvalidArgument
  AllocatedPeak take_allocated_peak(int device);
  /// How often what is allocated on a device has changed, with no lock: while it is what `take_allocated_peak` said,
  /// that would say no more than what there was `now`.
  std::uint64_t allocation_changes(int device) const noexcept;

  void set_room_maker(RoomMaker* room_maker); ///< not owned, outlives calls under way; nullptr takes it away
  void set_observer(AllocationObserver* observer); ///< not owned; is told of nothing once it is taken away by nullptr
  AllocatorOptions options() const;
  void set_options(const AllocatorOptions& options); ///< \throws InvalidArgument for one out of range

  /// Walks every structure: blocks tile segments, neighbours are coalesced where they may be, free
  /// lists and counters agree. nullopt: all is well; else what is wrong.
  std::optional<std::string> check() const;
  bool is_valid() const {
    return !check();
  }

  // For pthread_atfork. The mutex is held across the fork, and in the child the runtime is never called
  // again (its memory belongs to the parent): free only keeps the books, empty_cache gives back nothing,
  // allocate throws RuntimeFailure. The child has no managed memory; what host code may read of it, which is
  // the blocks whose home is the host, or was since they were handed out, is there as a copy.

  /// Takes the mutex and plans the copies; before the runtime's own handler (lock order).
  void before_fork();
  /// Makes the copies; after the runtime's own handler, which may finish what is being written.
  /// Memory that cannot be had for them is said on stderr: the child will not be able to read those bytes.
  void copy_for_child() noexcept;
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
