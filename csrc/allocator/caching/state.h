// Internal state, shared by the allocator's source files. The policy is described in caching_managed_allocator.h. The
// files:
//   caching_managed_allocator.cpp  the public functions: validation, locking
//   cache.cpp                      serve a request from the cache or from a new segment
//   pending.cpp                    free; freed blocks that other streams' work may still touch
//   segment_sizes.cpp              size of a new segment
//   block.h, heap.h                blocks, segments, free lists
//   stream_order.h                 events that order one stream's reuse after another's work
//   pool_statistics.h              stored statistics
//   fork_copies.h, fork.cpp        copies for a forked child
//   check.cpp                      inspection
// and in pressure/:
//   failure_path.cpp               what is tried before OutOfMemory is raised
//   caps.cpp, min_cost_range.cpp   a device's cap, and what to evict to make room
//   reserve_moves.cpp              blocks to relocate to make room
//   slides.cpp                     neighbours to push together to make room
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "allocator/adaptive_mutex.h"
#include "allocator/allocation_log.h"
#include "allocator/caching/caching_managed_allocator.h"
#include "allocator/caching/fork_copies.h"
#include "allocator/caching/heap.h"
#include "allocator/caching/pool_statistics.h"
#include "allocator/caching/stream_order.h"
#include "allocator/events.h"

namespace torch_uvm {

/// Under a cap, rounding a request up to large pages may waste at most 1/kRoundingShare of the cap, and at most
/// 1/kRoundingPart of the request.
inline constexpr std::size_t kRoundingShare = 128;
inline constexpr std::size_t kRoundingPart = 64;

/// A request and what follows from its size.
struct Request {
  std::size_t requested;
  std::size_t bytes; ///< size of the block, after rounding
  SizeClass kind;
  Location home;
  Stream stream;
  bool may_wait = true; ///< whether the host may wait for work or call the memory-pressure callback
  bool aligned = true; ///< whether a large block must begin on a large page

  /// True if the request is for the host, must not wait, and work queued on `earlier` is not done: then a block filed
  /// under `earlier` cannot serve it.
  bool barred(ManagedRuntime& runtime, Stream earlier) const {
    return !may_wait && stream.is_host() && !earlier.is_host() && !runtime.query_stream(earlier);
  }
};

/// Limit on the segments of one device.
struct DeviceCap {
  std::optional<std::size_t> cap;
  std::size_t ceiling = 0; ///< at least the cap; a permitted excess ends here
  /// For check(): the most segment bytes allowed since set_cap. The maximum of the cap, the bytes reserved at that
  /// time, and the totals after permitted excesses.
  std::size_t most = 0;
  bool leaves_none = false; ///< nothing is left for small requests any more
  bool refused = false; ///< the source has refused since a segment of the device was last made or released
};

/// Unlocks for a scope and locks again on exit, also on an exception.
class Unlocked {
 public:
  explicit Unlocked(std::unique_lock<AdaptiveMutex>& lock) : lock_(lock) {
    lock_.unlock();
  }
  ~Unlocked() {
    lock_.lock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  std::unique_lock<AdaptiveMutex>& lock_;
};

/// Functions that take a lock may release it temporarily; they hold it again when they return or throw. The other
/// functions never release it. A function that throws leaves the heap valid and no block reserved.
struct CachingManagedAllocator::State {
  using Lock = std::unique_lock<AdaptiveMutex>;

  State(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source, AllocatorOptions options);

  /// \throws InvalidArgument
  /// \param home nullopt: all homes
  void check_location(std::optional<Location> home) const;
  void check_stream(Stream stream) const;
  void check_not_forked() const; ///< \throws RuntimeFailure

  // cache.cpp. nullptr means that the request cannot be served this way. `refusal` is the source's error, or empty if a
  // cap refused.
  Block* from_cache(const Request& request, Lock& lock);
  Block* from_new_segment(const Request& request, std::size_t bytes, Lock& lock, std::optional<OutOfMemory>& refusal,
                          bool over_cap = false);
  Block* best_fit(const Request& request, const FreeList& free_list) const;
  /// Alignment of a request's block. Under a cap, and in the failure path's last resort, an unaligned block is better
  /// than none.
  std::size_t alignment_of(const Request& request) const {
    const bool fills_pages = request.bytes >= kWholePagesRequest && !cap_of(request.home) && request.aligned;
    return fills_pages ? kLargeGranularity : kBlockAlignment;
  }
  /// Size of the block that serves a request.
  std::size_t bytes_for(std::size_t requested, Location home) const {
    const std::optional<std::size_t>& cap = cap_of(home);
    const std::size_t whole = block_bytes(requested, cap ? kLargeRequest : kWholePagesRequest);
    const bool wastes = cap && whole - requested > std::min(*cap / kRoundingShare, requested / kRoundingPart);
    return wastes ? block_bytes(requested, kLargestRequest) : whole;
  }
  /// Under a cap, blocks that move share the large segments, and leave those of small requests to blocks that do not.
  SizeClass class_of(std::size_t requested, Location home) const {
    const bool moves = cap_of(home) && pressure_callback != nullptr && !pressure_callback->never_moves(requested);
    return std::max(size_class(requested), moves ? SizeClass::kMedium : SizeClass::kSmall);
  }
  Request request(std::size_t requested, Location home, Stream stream) const {
    return {.requested = requested,
            .bytes = bytes_for(requested, home),
            .kind = class_of(requested, home),
            .home = home,
            .stream = stream};
  }
  /// Takes a free block, orders the request's stream after the work of its free list, and allocates it.
  Block* take(Block* free, const Request& request, Lock& lock);
  /// Makes a request's stream wait for whatever a free block still has to wait for.
  void order_after(const Block& free, const Request& request, Lock& lock);
  /// Orders future work on `later` after the work queued on `earlier`. If `later` is the host, blocks until that work
  /// is done.
  /// \param filed_at when the block that `later` reuses was filed under `earlier`
  void order(Stream earlier, Stream later, std::uint64_t filed_at, Location home, Lock& lock);
  Block* allocate(Block* reserved, const Request& request, FreeList& free_list) noexcept;
  /// \return false if the prefetch failed. The pages then arrive by fault
  bool populate(void* ptr, std::size_t bytes, const Request& request) noexcept;

  /// Makes the stream wait for a block's memory, which does not count as an operator's time.
  void wait_for_memory(Stream stream, Event event);
  /// Waits for every device without concurrent managed access: any work on it keeps the host from touching managed
  /// memory.
  void wait_for_exclusive_devices();

  // Log allocations and frees. Called next to the corresponding updates of pool_statistics.
  void note_allocated(const Block* block) noexcept {
    if (log != nullptr) {
      log->allocated(reinterpret_cast<void*>(block->address), block->requested, block->free_list->stream);
    }
  }
  void note_refused(std::size_t requested, Stream stream) noexcept {
    if (log != nullptr) {
      log->refused(requested, stream);
    }
  }
  void note_freed(const Block* block) noexcept {
    if (log != nullptr) {
      log->freed(reinterpret_cast<void*>(block->address), block->requested, block->free_list->stream);
    }
  }

  // pending.cpp
  void free(Block* block) noexcept;
  /// Records events for the blocks freed since the last call: one event per stream, however many blocks there are.
  void record_pending() noexcept;
  /// Reclaims pending blocks whose events are complete. `all`: check every block; otherwise stop at the first, from the
  /// oldest on, that is not complete.
  void poll_pending(bool all);
  void wait_for_pending();
  void reclaim(Block* block) noexcept;
  void append_pending(Block* block) noexcept;
  void remove_pending(Block* block) noexcept;

  // failure_path.cpp
  Block* allocate_under_pressure(const Request& request, Lock& lock, std::optional<OutOfMemory> refusal);
  Block* retry(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  void move_away_for_small(const Request& request, Lock& lock);
  Block* call_pressure_callback(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  Block* from_run(const Request& request, Lock& lock);
  Block* take_run(const Heap::Run& run, const Request& request, Lock& lock);
  /// Releases unused segments, of one home or of all, until segments take no more than `enough`. \return bytes
  std::size_t release(std::optional<Location> home, std::size_t enough = 0) noexcept;
  /// Releases one unused segment. \return the next segment
  Heap::Segments::iterator release(Heap::Segments::iterator segment) noexcept;
  std::string where_the_bytes_are() const;
  /// \param explanation of the memory-pressure callback; may be empty
  [[noreturn]] void raise(std::size_t requested, Location home, const OutOfMemory& refusal,
                          const std::string& explanation = {});

  // segment_sizes.cpp
  /// Whether medium and large requests of a home share segments.
  bool shares(Location home) const {
    return least_shared_segment != 0 || (managed && options.segment_min_bytes) || cap_of(home);
  }
  /// Size of the segment to make for a request if there is room.
  std::size_t new_segment_bytes(const Request& request) const;
  std::size_t capped_segment_bytes(const Request& request, std::size_t own) const;
  /// Bytes of a cap that a new segment of `own` bytes leaves to segments of small requests.
  std::size_t left_for_small(Location home, SizeClass kind, std::size_t own) const;
  /// Whether a device has that much free memory now, so that populating a segment evicts nothing.
  bool has_free(Location home, std::size_t bytes) const;
  /// From a segment of new_segment_bytes. Halves the size after each refusal, down to the request's.
  Block* from_fresh_segment(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);

  // caps.cpp
  /// Whether a new segment of `bytes` would respect the cap. \param over_cap its ceiling
  bool cap_allows(Location home, std::size_t bytes, bool over_cap) const;
  /// A segment of `bytes` was made and is about to be added.
  void note_segment(Location home, std::size_t bytes) noexcept;
  void check_device(int device) const;
  const std::optional<std::size_t>& cap_of(Location home) const {
    return home.is_host() ? no_cap : caps[static_cast<std::size_t>(home.index)].cap;
  }
  /// Bytes of segments of a device.
  std::size_t taken(int device) const {
    return pool_statistics.reserved_bytes(Location::device(device));
  }
  /// Bytes by which a new segment would exceed the cap or take what is left for small requests; 0 without a cap.
  std::size_t excess(Location home, SizeClass kind, std::size_t bytes) const;
  /// What can be allocated under the cap without waiting for pending frees and without the memory-pressure callback.
  Block* within_cap(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  Block* merged_within_cap(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  OutOfMemory cap_refusal(const Request& request) const;
  /// Whether a request that the cap refused may exceed it: the memory-pressure callback decides.
  bool may_exceed_cap(const Request& request, std::size_t segment_bytes, Lock& lock);
  /// Releases unused segments of a device, as few as make room for `bytes` more under the cap. Releases none if all of
  /// them would not be enough. \return whether there is room
  bool fit_under_cap(const Request& request, std::size_t bytes);
  /// Whether every stream used by the blocks of the device's segments is idle.
  bool streams_are_idle(int device);

  // reserve_moves.cpp
  class Places;
  /// Gives the owner `move.to` in place of `move.from`, also in the statistics. `move.from` stays reserved.
  void pass_on(Move& move, FreeList& free_list) noexcept;
  /// The opposite: the owner keeps `move.from`. `move.to` stays reserved.
  void take_back(const Move& move) noexcept;

  // check.cpp
  std::optional<std::string> check() const;

  ManagedRuntime& runtime;
  const std::unique_ptr<SegmentSource> source;
  const bool managed; ///< whether the source's memory can migrate
  const bool serves_host;
  const bool serves_devices;
  const std::size_t least_shared_segment;
  const int devices;
  /// Devices without concurrent access to managed memory; empty if the memory is not managed.
  const std::vector<int> exclusive;

  mutable AdaptiveMutex mutex; ///< guards everything below
  AllocatorOptions options;
  PressureCallback* pressure_callback = nullptr;
  AllocationLog* log = nullptr; ///< nullptr: none. In a forked child it does nothing
  std::vector<DeviceCap> caps; ///< by device
  const std::optional<std::size_t> no_cap; ///< the cap of the host
  PoolStatistics pool_statistics;
  EventPool events; // declared before the heap, whose free blocks return their events on destruction
  StreamOrder stream_order;
  Heap heap;
  Block* pending_first = nullptr; ///< oldest
  Block* pending_last = nullptr;
  Block* unrecorded_first = nullptr; ///< from here to pending_last, no event has been recorded yet
  bool in_forked_child = false;
  ForkCopies fork_copies; ///< empty except during a fork
  std::size_t available_to_child = 0; ///< upper bound of the copies' bytes
};

/// Contiguous blocks of a segment, first and last included.
struct Span {
  Block* first = nullptr;
  Block* last = nullptr;
  double cost = 0; ///< at first the bytes to move; then what their owners say
  bool priced = false;
};

/// Takes the cheapest of the spans, a heap by `cost`, of those that cost at most `most`. A span's cost is a lower bound
/// until `cost` is asked, which reads what the owner of each block knows: more work than the search itself.
std::optional<Span> take_cheapest(std::vector<Span>& spans, double most, const BlockCost& cost);

} // namespace torch_uvm
