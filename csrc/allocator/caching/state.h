// What the allocator's source files share. The policy is in caching_managed_allocator.h; here is who does
// which part of it:
//   caching_managed_allocator.cpp  the public functions: validation, locking, free
//   cache.cpp                      serving a request from what is cached, or from a new segment
//   pending.cpp                    blocks that were freed while other streams' work may touch them
//   release.cpp                    what is given back before memory runs short
//   failure_path.cpp               what is done before OutOfMemory is raised
//   segment_sizes.cpp              how much is asked of the source at once
//   caps.cpp, cheapest_run.cpp     what bounds a device's segments, and what to give up for room
//   vacate.cpp                     what to move out of the way
//   fork_copies.h, fork.cpp        what a forked child gets
//   snapshot.cpp, check.cpp        looking at it all
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "allocator/adaptive_mutex.h"
#include "allocator/allocation_observer.h"
#include "allocator/caching/caching_managed_allocator.h"
#include "allocator/caching/fork_copies.h"
#include "allocator/caching/heap.h"
#include "allocator/caching/ledger.h"
#include "allocator/caching/stream_order.h"
#include "allocator/events.h"

namespace torch_uvm {

/// Of a cap, what rounding a request up may waste.
inline constexpr std::size_t kRoundingShare = 128;

/// A request, with what follows from its size.
struct Request {
  /// \param bytes of the block
  Request(std::size_t requested, std::size_t bytes, Location home, Stream stream)
      : requested(requested), bytes(bytes), kind(size_class(requested)), home(home), stream(stream) {}

  std::size_t requested;
  std::size_t bytes;
  SizeClass kind;
  Location home;
  Stream stream;
  bool may_wait = true; ///< the host, for work or for the door
  bool aligned = true; ///< whether a large block has to begin on a large page

  /// Whether it can have what is filed under a stream only after the host has waited for that, which it must not.
  bool barred(ManagedRuntime& runtime, Stream earlier) const {
    return !may_wait && stream.is_host() && !earlier.is_host() && !runtime.query_stream(earlier);
  }
};

/// What bounds the segments of one device.
struct DeviceCap {
  std::optional<std::size_t> cap;
  bool hard = false;
  std::size_t under_way = 0; ///< bytes that the source is being asked for
  std::size_t most =
      0; ///< bytes that a hard cap allows: the cap, what there was when it was set, or what the door let by
  bool refused = false; ///< by the source, since a segment was last made for the device, or given back
};

/// Lets go of a lock and takes it again, however the scope is left.
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

/// Functions that take a lock may let go of it for a while and hold it again when they return or throw;
/// the others keep it. Whatever throws has left the heap valid and no block reserved.
struct CachingManagedAllocator::State {
  using Lock = std::unique_lock<AdaptiveMutex>;

  State(ManagedRuntime& runtime, std::unique_ptr<SegmentSource> source, AllocatorOptions options);

  /// \throws InvalidArgument
  void check_location(Location home) const;
  void check_stream(Stream stream) const;
  void check_not_forked() const; ///< \throws RuntimeFailure

  // cache.cpp: nullptr means that it cannot be served this way; `refusal` is what the source said, or nothing where
  // a cap was in the way
  Block* from_cache(const Request& request, Lock& lock);
  Block* from_new_segment(const Request& request, std::size_t bytes, Lock& lock, std::optional<OutOfMemory>& refusal,
                          bool over_cap = false);
  Block* best_fit(const Request& request, const Lane& lane) const;
  /// Takes what best_fit has found out of the index. \throws std::bad_alloc, and nothing has changed
  Block* carve(Block* free, const Request& request);
  /// Where the block of a request begins. Under a cap, and in the failure path's last resort, one that begins elsewhere
  /// beats none.
  std::size_t alignment_of(const Request& request) const {
    return cap_of(request.home) || !request.aligned ? kBlockAlignment : block_alignment(request.bytes);
  }
  /// The bytes of the block that serves a request.
  std::size_t bytes_for(std::size_t requested, Location home) const {
    const std::size_t bytes = round_up_to_division(requested, options.roundup_power2_divisions);
    const std::optional<std::size_t>& cap = cap_of(home);
    const std::size_t whole = block_bytes(bytes, cap ? kLargeRequest : kWholePagesRequest);
    return cap && whole - bytes > *cap / kRoundingShare ? block_bytes(bytes, kLargestRequest) : whole;
  }
  /// Takes a free block, orders it after its lane's work, and hands it out.
  Block* take(Block* free, const Request& request, Lock& lock);
  /// Orders a request's stream after what a free block has to wait for.
  void order_after(const Block& free, const Request& request, Lock& lock);
  /// Makes what comes next on `later` wait for what was queued on `earlier`; for the host, waits here.
  /// \param filed_at when what `later` wants was filed under `earlier`
  void order(Stream earlier, Stream later, std::uint64_t filed_at, Location home, Lock& lock);
  Block* hand_out(Block* reserved, const Request& request, Lane& lane) noexcept;
  /// Whether a block must not be split. Under a cap every block may be: segments are few and large.
  bool stays_whole(const Block* block) const {
    return options.max_split_bytes && block->bytes > *options.max_split_bytes && !cap_of(block->segment->home);
  }
  /// \return false: it failed, which costs faults later and nothing else
  bool populate(void* ptr, std::size_t bytes, const Request& request) noexcept;

  /// Waits for every device whose work, on whatever memory, keeps the host from touching managed memory.
  void wait_for_exclusive_devices();

  // Beside the ledger: what callers get and give back.
  void note_allocated(const Block* block) noexcept {
    if (observer != nullptr) {
      observer->allocated(reinterpret_cast<void*>(block->address), block->requested, block->lane->stream);
    }
  }
  void note_refused(std::size_t requested, Stream stream) noexcept {
    if (observer != nullptr) {
      observer->refused(requested, stream);
    }
  }
  void note_freed(const Block* block) noexcept {
    if (observer != nullptr) {
      observer->freed(reinterpret_cast<void*>(block->address), block->requested, block->lane->stream);
    }
  }

  // fork.cpp
  /// Waits for the work that may still write a block, but for that of `finished` streams, which grow.
  void finish_work_on(const Block& block, std::vector<Stream>& finished) noexcept;

  // pending.cpp
  void free(Block* block) noexcept;
  /// Records what blocks freed since the last time wait for: one event for each stream, however many they are.
  void record_pending() noexcept;
  /// Reclaims blocks whose events are reached: from the oldest on while they are, or wherever they are.
  void poll_pending(bool all);
  void wait_for_pending();
  void reclaim(Block* block) noexcept;
  void append_pending(Block* block) noexcept;
  void remove_pending(Block* block) noexcept;

  // release.cpp
  /// Gives back what a home keeps beyond the release threshold, those unused for longest first and while their work is
  /// done: each that is looked at goes, but for the last.
  void give_back_excess(Location home) noexcept;
  bool work_is_done(const Segment& segment) const noexcept;
  /// Under garbage_collection_threshold: gives back old segments, so that `bytes` more stay below it if they can.
  void collect_garbage(const Request& request, std::size_t bytes) noexcept;

  // failure_path.cpp
  Block* allocate_under_pressure(const Request& request, Lock& lock, std::optional<OutOfMemory> refusal);
  Block* retry(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  Block* ask_the_door(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  Block* from_run(const Request& request, Lock& lock);
  /// Gives back segments with no block in use, of one home or of all. \return bytes
  std::size_t give_back(std::optional<Location> home) noexcept;
  /// One segment with no block in use. \return the next one
  Heap::Segments::iterator give_back(Heap::Segments::iterator segment) noexcept;
  std::string where_the_bytes_are() const;
  /// \param explanation of the door; empty: it has none
  [[noreturn]] void raise(std::size_t requested, Location home, const OutOfMemory& refusal,
                          const std::string& explanation = {});

  // segment_sizes.cpp
  /// Whether medium and large requests of a home share segments.
  bool shares(Location home) const {
    return least_shared_segment != 0 || (managed && options.segment_min_bytes) || cap_of(home);
  }
  /// The bytes of the segment to make for a request where there is room.
  std::size_t new_segment_bytes(const Request& request) const;
  std::size_t capped_segment_bytes(const Request& request, std::size_t own) const;
  /// Whether a device has that much free now, so that to populate it drives nothing out.
  bool has_free(Location home, std::size_t bytes) const;
  /// From a segment of new_segment_bytes, or where that is refused, of what the request itself needs.
  Block* from_fresh_segment(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);

  // caps.cpp
  /// Bytes claimed of a device's budget while a segment of that many is made. Lives under the mutex, which may be let
  /// go of meanwhile: two threads cannot both claim the last of it.
  class Claim {
   public:
    /// \param over_cap the cap does not refuse
    Claim(State& state, Location home, std::size_t bytes, bool over_cap);
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    explicit operator bool() const {
      return granted_;
    }
    void made() const noexcept; ///< the segment was made, and is about to be added
    void refused() const noexcept; ///< by the source

   private:
    State& state_;
    const Location home_;
    const std::size_t bytes_;
    DeviceCap* const budget_; ///< none: of the host
    bool granted_ = true;
    bool over_ = false;
  };
  void check_device(int device) const;
  const std::optional<std::size_t>& cap_of(Location home) const {
    return home.is_host() ? no_cap : budgets[static_cast<std::size_t>(home.index)].cap;
  }
  /// Bytes of segments made for a device or being made.
  std::size_t taken(int device) const {
    return ledger.reserved_bytes(Location::device(device)) + budgets[static_cast<std::size_t>(device)].under_way;
  }
  /// What can be had under the cap of its home with no wait for pending frees and without the door.
  Block* within_cap(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  /// From the largest segment to share that the source gives: half as much each time that it refuses.
  Block* from_shared_segment(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  Block* merged_within_cap(const Request& request, Lock& lock, std::optional<OutOfMemory>& refusal);
  /// Waits while another thread makes a segment under the same cap.
  void wait_for_claims(const Request& request, Lock& lock);
  OutOfMemory cap_refusal(const Request& request) const;
  /// What the cap refuses may be had all the same; asks the door where it is hard.
  bool may_exceed_cap(const Request& request, Lock& lock);
  /// Gives back segments of a device with no block in use, as few as leave room for `bytes` more under the cap, or
  /// none if all of them do not. \return there is room
  bool fit_under_cap(const Request& request, std::size_t bytes);
  /// Whether no stream that a block of the device's segments follows has anything queued.
  bool streams_are_idle(int device);
  void give_back_above_cap(int device) noexcept;

  class Places; // vacate.cpp

  // check.cpp
  std::optional<std::string> check() const;

  ManagedRuntime& runtime;
  const std::unique_ptr<SegmentSource> source;
  const bool managed; ///< the source's memory can move
  const bool serves_host;
  const bool serves_devices;
  const std::size_t least_shared_segment;
  const int devices;
  const std::vector<int> exclusive; ///< devices without concurrent access to managed memory, if it is that

  mutable AdaptiveMutex mutex; ///< guards all below
  AllocatorOptions options;
  RoomMaker* room_maker = nullptr;
  AllocationObserver* observer = nullptr; ///< none in a forked child
  std::vector<DeviceCap> budgets; ///< by device
  std::condition_variable_any claim_ended; ///< a segment was made, or refused
  const std::optional<std::size_t> no_cap; ///< the host's
  Ledger ledger;
  EventPool events; // outlives the heap, whose free blocks give theirs back
  StreamOrder stream_order;
  Heap heap;
  Block* pending_first = nullptr; ///< oldest
  Block* pending_last = nullptr;
  Block* unrecorded_first = nullptr; ///< from there on to the last no event has been recorded
  bool in_forked_child = false;
  ForkCopies fork_copies; ///< empty but while a fork is under way
  std::size_t available_to_child = 0; ///< bytes that they may take
};

} // namespace torch_uvm
