// A caching allocator for managed memory. One instance serves the host and all devices.
//
// - A segment is one allocation from the source. A block is a piece of a segment, either allocated or free. Both have a
//   home: the device, or the host, that uses them first. The small requests of a home share segments. So do the medium
//   and large ones, except very large ones, which get a segment of their own. New shared segments grow with the bytes
//   reserved. Large blocks start on and fill 2 MiB pages where that wastes little.
// - A free block is filed under the home where its pages are *now* and under the stream that used it last. Allocation
//   is best fit with splitting and coalescing: the smallest free block that is large enough, at the lowest address
//   among equals.
// - Stream-ordered: a block freed on a stream is immediately reusable on that stream, with no event. An event is
//   recorded only in three cases: a second stream used the block (record_stream), another stream reuses it, or the host
//   reuses it while device work may still touch it (the host then waits). One event covers all blocks freed before it:
//   a batch of blocks that moves to another stream, and the recorded blocks freed since the last allocation. A caller
//   that has its own event passes it to free_after.
// - A block of another stream is reused only if no block of the request's own stream fits, and before a new segment is
//   made. Neighbours are merged only if they are filed under the same home and stream. The failure path merges any free
//   neighbours.
// - A fresh segment homed on a device is populated by one prefetch. The prefetch is a hint: if it fails, it is counted
//   and the pages arrive by fault.
// - A device may have a cap on its segments (`set_cap`).
// - When memory runs short, the steps in the header comment of pressure/failure_path.cpp are tried. If none helps,
//   OutOfMemory is raised, with a table of where the bytes are.
//
// A stream must outlive the blocks that are filed under it or recorded for it. Before destroying a stream, free these
// blocks and call empty_cache.
//
// Lock order: this allocator's mutex, then the runtime's. The mutex is released while the memory-pressure callback
// runs, while a segment is allocated and prefetched without a cap, and while the host waits for a single block. The
// failure path and empty_cache hold the mutex while they wait for pending blocks and release segments, because the
// blocks they found must not change. No Python is called and the GIL is never taken here; callers may or may not hold
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator/segment_source.h"
#include "allocator/size_classes.h"
#include "allocator/statistics.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Tunables of the policy. The option table (config/options.h) parses and prints them.
struct AllocatorOptions {
  bool populate = true; ///< prefetch a fresh segment to its device
  /// Minimum and maximum size of a segment shared by medium and large requests. In between, a new segment is one eighth
  /// of the bytes reserved for its home. A request larger than that gets its own segment. If the minimum is unset or
  /// the memory is not managed, every large request gets its own segment.
  std::optional<std::size_t> segment_min_bytes = kSegmentMin;
  std::size_t segment_max_bytes = kSegmentMax;
};

/// Memory-pressure callback: the residency layer implements it and the allocator calls it when memory runs short.
class PressureCallback {
 public:
  virtual ~PressureCallback() = default;
  /// Frees `bytes` of contiguous memory for a block of `home` that `stream` will use first. Returns true if a retry is
  /// worthwhile. Called again, a bounded number of times, if the retry fails: another thread may have taken the memory.
  virtual bool make_room(std::size_t bytes, Location home, Stream stream) = 0;
  /// Whether blocks of this size are never moved: in a large segment they split what could be one range.
  virtual bool never_moves(std::size_t /*bytes*/) const {
    return false;
  }
  /// Called for a small request under a cap that will never move and finds no place in the segments of small requests.
  /// May move others away from the lowest address that has room for it.
  virtual void make_room_for_small(std::size_t /*bytes*/, Location /*home*/, Stream /*stream*/) {}
  /// Called when nothing more can be freed. Returns true if this request may exceed the cap up to its ceiling, because
  /// a running operator cannot proceed without it.
  virtual bool may_exceed(std::size_t /*bytes*/, Location /*home*/) {
    return false;
  }
  /// Calls `queue` once, which makes the stream wait for a block's memory. Called with the allocator's lock, so it must
  /// not wait for a lock that is held while this allocator is called.
  virtual void waits_for_memory(Stream /*stream*/, const std::function<void()>& queue) {
    queue();
  }
  /// Text for the error message of a refused request: complete sentences, each ending in a newline. May be empty.
  virtual std::string explain(std::size_t /*bytes*/, Location /*home*/) noexcept {
    return {};
  }
};

class AllocationLog; // allocator/allocation_log.h

struct Block; // defined in allocator/caching/block.h; an opaque handle for callers

/// A block as `snapshot` reports it. Blocks are in address order.
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

/// Cost of evicting or moving a block, at least 0; `kNever`: it cannot be. Called under the allocator's mutex.
/// \param tag of the block, may be null
using BlockCost = std::function<double(void* tag, std::size_t bytes)>;
inline constexpr double kNever = std::numeric_limits<double>::infinity();

/// Whether a block's owner consents to what is about to happen to it. Called under the allocator's mutex.
using BlockConsent = std::function<bool(void* tag)>;

/// Thread-safe. Must outlive every block. Process-wide instances are leaked on purpose, because libraries free static
/// workspaces at exit.
class CachingManagedAllocator {
 public:
  /// \throws InvalidArgument for options that set_options refuses
  CachingManagedAllocator(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source,
                          AllocatorOptions options = {});
  ~CachingManagedAllocator(); ///< releases every segment; a segment with a block still in use is leaked
  CachingManagedAllocator(const CachingManagedAllocator&) = delete;
  CachingManagedAllocator& operator=(const CachingManagedAllocator&) = delete;

  /// Returns a block of at least `bytes` for use on `stream`, aligned to 512 bytes.
  /// \param bytes 0 returns nullptr
  /// \param home where the block will be used first
  /// \param stream the stream that will use it first; Stream::host() if home is the host
  /// \throws OutOfMemory with a table of where the bytes are; InvalidArgument for an unknown home or stream;
  ///         RuntimeFailure if a runtime call failed, and in a forked child. Strong guarantee
  Block* allocate(std::size_t bytes, Location home, Stream stream);

  enum class Try : std::uint8_t {
    kCached, ///< from cached segments alone
    kWithoutWait,
    kWaiting, ///< blocks the host until no stream uses what is free
  };
  /// Like allocate, but returns nullptr where allocate would have to make room. Never calls the memory-pressure
  /// callback, exceeds a cap or raises OutOfMemory, and blocks the host only with kWaiting. May release cached segments
  /// of the device to stay under its cap, if all streams used by the device's blocks are idle.
  /// \throws InvalidArgument and RuntimeFailure as allocate does
  Block* try_allocate(std::size_t bytes, Location home, Stream stream, Try how = Try::kWithoutWait);

  /// Frees a block in the order of its stream. Never throws: if a runtime call fails, the block stays pending until
  /// empty_cache. nullptr is ignored. A double free aborts the program, as in malloc, unless the block is in use again
  /// by then.
  void free(Block* block) noexcept;

  /// Like free, but the block is reusable as soon as `ready` completes, whatever else its stream has queued.
  /// \param ready recorded on a stream of the block's device after all work that touches the block; ownership passes to
  ///         the allocator
  void free_after(Block* block, Event ready, Stream stream) noexcept;
  /// Like free, for a block that no queued work touches: a stream that reuses it waits for nothing.
  /// \param stream is preferred for reuse
  void free_idle(Block* block, Stream stream) noexcept;
  // Events for free_after, which the caller records on `stream`. They come from the allocator's pool and return to it
  // through `free_after`, or through `recycle_event` if unused. \throws what the runtime throws
  Event take_event(Stream stream);
  void recycle_event(Stream stream, Event event) noexcept;

  /// Size of the block that a request of that size for the device gets now. \throws InvalidArgument
  std::size_t bytes_taken(std::size_t requested, int device) const;

  /// Records that `stream` also uses the block. The block is not reused before the work queued on `stream` at the time
  /// of `free` is done. The host's own work needs no record. \throws InvalidArgument
  void record_stream(Block* block, Stream stream);

  /// Records that the block's pages have moved. The block belongs to `home` and `stream` from now on and is filed there
  /// when freed. Work queued on its previous stream is still waited for.
  /// \throws InvalidArgument, also for a new home if the memory cannot move
  void set_home(Block* block, Location home, Stream stream);

  /// Assigns the block to `stream` with no event. The caller has made `stream` wait for all work that touches the
  /// block, including the work of recorded streams. \throws InvalidArgument
  void hand_over(Block* block, Stream stream);

  // An opaque pointer of the residency layer. nullptr at first and after the block is freed. Takes no lock: the owner
  // of the block calls these. The owner sets tags under its own mutex, which it also holds when it calls
  // min_cost_range, min_cost_range_near, first_fit_range, find_slides, slide or reserve_moves. `slide` clears the tag
  // of the block that it moves, and so does `reserve_moves` after `claim` has returned true.
  void set_tag(Block* block, void* tag) noexcept;
  void* tag(const Block* block) const noexcept;

  /// The allocated block that contains this address, or nullptr. Walks the blocks of one segment, possibly tens of
  /// thousands of small ones: too slow to call on every operator.
  Block* find(const void* ptr) const;

  // Accessors of an allocated block. The first three take no lock and accept nullptr (address nullptr, 0 bytes). home
  // and stream throw InvalidArgument for nullptr and reflect set_home.
  void* data(const Block* block) const;
  std::size_t bytes(const Block* block) const; ///< block size, after rounding
  std::size_t requested_bytes(const Block* block) const;
  Location home(const Block* block) const;
  Stream stream(const Block* block) const;
  /// Every stream whose queued work may touch the block: its own unless that is the host's, and the recorded ones.
  std::vector<Stream> streams(const Block* block) const;

  /// Waits for pending frees, then releases every segment with no block in use.
  /// \return bytes released; 0 in a forked child
  /// \throws RuntimeFailure if the wait failed; blocks waited for until then stay cached
  std::size_t empty_cache();

  // Of one home, or of all homes together. The total's peak is the peak of the sum, not the sum of the peaks.
  // \throws InvalidArgument
  Statistics statistics(std::optional<Location> home = std::nullopt) const;
  void reset_peak_statistics(std::optional<Location> home = std::nullopt);
  void reset_accumulated_statistics(std::optional<Location> home = std::nullopt);
  // Two of them, which are much cheaper to read. \throws InvalidArgument
  std::size_t allocated_bytes(Location home) const;
  std::size_t reserved_bytes(Location home) const;

  std::vector<SegmentInfo> snapshot() const; ///< consistent; in address order

  /// Limits the bytes of segments made for a device (its budget); nullopt removes the cap. If more is reserved already,
  /// unused segments are released, after waiting for pending frees; blocks in use stay. Setting the cap again later
  /// releases what has become free since. If nothing more can be freed, allocate raises OutOfMemory.
  /// \param ceiling PressureCallback::may_exceed may let a request exceed the cap up to here, which num_over_cap
  /// counts.
  ///         If it is the cap, the cap is all that the device has: segments then grow with demand. Otherwise one takes
  ///         all of the cap
  /// \throws InvalidArgument; RuntimeFailure if the wait failed, but the cap is set
  void set_cap(int device, std::optional<std::size_t> bytes, std::size_t ceiling = kNoCeiling);
  static constexpr std::size_t kNoCeiling = ~std::size_t{0};
  /// Large requests may take what they leave of the cap to small ones, until it changes. \throws InvalidArgument
  void leave_none_for_small(int device);
  std::optional<std::size_t> cap(int device) const; ///< \throws InvalidArgument
  /// Free bytes for large blocks under a device's cap, in segments and for new ones, possibly in pieces. 0 without a
  /// cap. \throws InvalidArgument
  std::size_t unused(int device) const;

  /// The tags of the blocks of the device's segments that together have at least `bytes`, and cost the least to empty,
  /// as far as there are any. \throws InvalidArgument
  std::vector<void*> min_cost_segments(std::size_t bytes, int device, const BlockCost& cost) const;

  /// Min-cost eviction range: the cheapest contiguous blocks of a device's segments whose eviction frees `bytes` in one
  /// piece. Returns the tags of the allocated ones, lowest address first. If no segment can hold `bytes`, returns all
  /// blocks of the cheapest segments whose release makes room for a new segment. Ties are broken by fewest allocated
  /// bytes, then pending bytes, then total bytes.
  /// \param cost of evicting a block, called once per allocated block. Free and pending blocks cost nothing
  /// \return nullopt: there is no such range; an empty vector: the bytes are free already, or will be once pending
  ///         frees complete
  /// \throws InvalidArgument; what `cost` throws
  std::optional<std::vector<void*>> min_cost_range(std::size_t bytes, int device, const BlockCost& cost) const;
  /// The same, but only in the runs of blocks around these ones, whose cost is finite, and never a new segment. Takes
  /// no time for the other blocks.
  std::optional<std::vector<void*>> min_cost_range_near(std::vector<const Block*> blocks, std::size_t bytes, int device,
                                                        const BlockCost& cost) const;
  /// First-fit range: like min_cost_range, but the range at the lowest address whatever it costs, and never a new
  /// segment.
  std::optional<std::vector<void*>> first_fit_range(std::size_t bytes, int device, const BlockCost& cost) const;

  /// Relocation of an allocated block to another block of the same device.
  struct Move {
    void* tag = nullptr; ///< of the block
    Block* from = nullptr;
    Block* to = nullptr;
    const void* source = nullptr; ///< the bytes to copy to `to`
    Stream earlier; ///< the stream that `from` was filed under
    bool recorded = false; ///< the new stream had been recorded for the block
    bool slid = false; ///< made by `slide`: source and destination may overlap
  };
  /// Reserves the relocation of contiguous blocks, to free `bytes` in one piece. Chooses the cheapest range whose
  /// blocks fit into free memory elsewhere on the device, and allocates the destinations there, filed under `stream`.
  /// Each move must be finished by `commit`, once the bytes are copied, or `roll_back`. Until then `from`
  /// is reserved. Never blocks the host and makes no segment.
  /// \param cost of moving a block, at least its bytes
  /// \param claim called for each chosen block, before anything changes. true: the owner will not free the block until
  ///         the move is finished. false: another range is tried
  /// \return empty: nothing has to move, or no range can be moved
  /// \throws InvalidArgument; RuntimeFailure; what `cost` and `claim` throw. Strong guarantee
  std::vector<Move> reserve_moves(std::size_t bytes, int device, Stream stream, const BlockCost& cost,
                                  const BlockConsent& claim);
  /// A range whose free pieces become one of at least the request once its allocated blocks slide together.
  struct Slides {
    struct Step {
      void* tag = nullptr; ///< of the block
      bool up = false; ///< towards higher addresses
    };
    std::vector<Step> steps; ///< in this order, each block slides once
    double cost = 0;
  };
  /// The cheapest such range, by `cost` and the number of copies; a range that needs too many copies is not taken.
  /// \param slides the cost of moving a block, at least its bytes
  /// \param most a range that costs more is not taken
  /// \return nullopt: there is none, or free neighbours hold the request
  /// \throws InvalidArgument; what `slides` throws
  std::optional<Slides> find_slides(std::size_t bytes, int device, const BlockCost& slides, double most = kNever) const;
  /// Exchanges a block with the free blocks directly below it (`up`: above it), and reserves the move like
  /// reserve_moves. Only the owner may call this, who does not free the block until the move is finished.
  /// \return nullopt: there is no free neighbour on that side, or the block cannot move; nothing has changed
  /// \throws InvalidArgument; RuntimeFailure. Strong guarantee
  std::optional<Move> slide(Block* block, bool up, Stream stream);
  /// Commits a move: frees `from`, filed like `to`, because that stream runs after all work that touches `from`.
  void commit(const Move& move) noexcept;
  /// Rolls a move back: the owner keeps `from`, with its tag.
  void roll_back(const Move& move) noexcept;

  struct AllocatedPeak {
    std::size_t most = 0; ///< peak of the allocated bytes since the last call
    std::size_t now = 0;
    std::uint64_t changes = 0; ///< see allocation_changes
  };
  /// Returns and resets the peak of a device. \throws InvalidArgument
  AllocatedPeak take_allocated_peak(int device);
  /// Counts the allocations and frees of a device; takes no lock. While it equals `changes` of the last
  /// take_allocated_peak, the next call would return `now` as the peak.
  std::uint64_t allocation_changes(int device) const noexcept;

  void set_pressure_callback(
      PressureCallback* pressure_callback); ///< not owned, must outlive calls in progress; nullptr removes it
  /// Logs every allocation and free, in their order: if two blocks share an address, the first is freed before the
  /// second is allocated. \param log not owned; not called again after it was replaced by nullptr
  void set_log(AllocationLog* log);
  AllocatorOptions options() const;
  void set_options(const AllocatorOptions& options); ///< \throws InvalidArgument if a value is out of range

  /// Checks every invariant: blocks tile segments, neighbours are coalesced where they can be, free lists and
  /// statistics agree. Returns the first violation, or nullopt.
  std::optional<std::string> check() const;

  // For pthread_atfork. The mutex is held across the fork. The child never calls the runtime again, because the
  // runtime's memory belongs to the parent: free only updates the statistics, empty_cache releases nothing, allocate
  // throws RuntimeFailure. The child has no managed memory. It gets copies of the blocks that host code may read: those
  // whose home is the host, or was at any time since they were allocated.

  /// Locks the mutex and plans the copies. Runs before the runtime's own handler (lock order).
  void before_fork();
  /// Makes the copies. Runs after the runtime's own handler, which may finish pending writes. If memory for a copy is
  /// not available, stderr says so and the child cannot read those bytes.
  void copy_for_child() noexcept;
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

} // namespace torch_uvm
