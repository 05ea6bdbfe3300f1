// The residency engine: keeps the device memory of managed storages within a budget by moving storages between the
// device and pinned host memory.
//
// - The engine is called before and after each outermost operator and carries out the policy's schedule: it prefetches
//   storages before their use and writes them back after it. Operands that the schedule missed are fetched on demand.
// - A device's budget is a cap on the allocator's segments. When an allocation does not fit under the cap, the
//   allocator calls back (PressureCallback) and the engine evicts the cheapest device copies that free a contiguous
//   range (room.cpp).
// - Copies are asynchronous, on the engine's own streams, and ordered by events with the streams that use the storage.
//   The host waits for them only before a pointer escapes PyTorch (`settle`), in a graph capture (`captured`), when a
//   budget is set or lifted, and after a failure of the runtime.
// - A storage's pointer changes only between operators. The operands and results of a running operator do not move.
//
// Lock order: the engine's mutex, then an allocator's, then the runtime's. The mutex is released before the engine
// drops its reference to a storage, since that may be the last reference. The engine calls no Python and never takes
// the GIL.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "allocator/events.h"
#include "residency/engine/record.h"
#include "residency/engine/relocation_min.h"
#include "residency/engine/residency_statistics.h"
#include "residency/engine/staging.h"
#include "residency/engine/storage_adapter.h"
#include "residency/engine/transfers.h"
#include "residency/policy/flat_map.h"
#include "residency/policy/policy.h"
#include "residency/trace/access_recorder.h"
#include "residency/trace/allocation_sites.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Number of operators for which a storage counts as unmovable after an attempt to move it failed.
inline constexpr std::uint64_t kFixedFor = 64;

class Engine final : public PressureCallback {
 public:
  /// All arguments must outlive the engine. The engine is leaked on purpose: storages are freed after static
  /// destructors have run.
  Engine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages);

  /// Limits the managed memory that a device may reserve. nullopt: no budget; the driver migrates pages on demand.
  /// \param hard exceeding the budget raises OutOfMemory; a soft budget is exceeded if nothing can be evicted
  void set_budget(int device, std::optional<std::size_t> bytes, bool hard);
  std::optional<std::size_t> budget(int device) const;
  /// Limits the pinned memory for host copies. nullopt: no limit. At the limit nothing more can be evicted.
  void set_host_limit(std::optional<std::size_t> bytes);
  /// Size of each of the four staging slots in plain device memory. nullopt: derived from the budget, and none on
  /// devices that do not need staging; 0: no staging. Takes effect with the next `set_budget`.
  void set_staging(std::optional<std::size_t> slot_bytes);

  /// Whether any device needs its operators watched. One atomic load. A device with a soft budget is idle until memory
  /// first runs short; any device becomes idle while its steps repeat and fit (sleep.cpp).
  bool is_awake() const noexcept {
    return awake_.load(std::memory_order_acquire);
  }
  /// Whether a device is idle because its steps fit. If so, call `note_allocation` after allocations. One relaxed load.
  bool has_idle_devices() const noexcept {
    return idle_devices_.load(std::memory_order_relaxed) != 0;
  }
  /// Whether unwatched operators may still run on a device that is or was idle. One relaxed load.
  bool is_unsettled() const noexcept {
    return unsettled_.load(std::memory_order_relaxed);
  }
  /// Brackets the run of a compiled graph that begins while a device is idle.
  void begin_unseen_graph() noexcept {
    ++unseen_graphs_;
  }
  void end_unseen_graph() noexcept {
    --unseen_graphs_;
  }
  /// Called after managed memory was allocated on a device. Wakes the device if it now uses more than its idle steps.
  void note_allocation(int device);
  /// Makes an idle device active: its operators are watched from now on.
  void wake(int device);
  /// Wakes the devices that are idle because their steps fit.
  void wake_resting();
  /// The same, and keeps all devices from becoming idle again.
  void stay_awake() {
    if (!stays_awake_.load(std::memory_order_relaxed) && !stays_awake_.exchange(true)) {
      wake_resting();
    }
  }

  /// Holds the engine's mutex, which guards the records. On release it drops the storage references collected in
  /// `kept_`, after unlocking.
  class Lock {
   public:
    explicit Lock(Engine& engine) : engine_(engine), lock_(engine.mutex_) {}
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    /// Releases the lock until a block is freed, for at most a millisecond, and takes it again.
    void wait_for_a_block();

   private:
    void release();

    Engine& engine_;
    std::unique_lock<std::mutex> lock_;
  };

  /// Creates the record of a storage that is seen for the first time. Requires the lock.
  Record* adopt(Block* block, int device, void* storage);
  /// Whether operators of the device are watched: it has a budget and is active.
  bool watches(int device) const {
    const Device& asked = devices_[static_cast<std::size_t>(device)];
    return asked.budget && !asked.asleep;
  }
  /// Whether storages of the device have records: it has a budget, active or idle.
  bool knows(int device) const {
    return devices_[static_cast<std::size_t>(device)].budget.has_value();
  }
  /// The record of the storage on this block, or nullptr. Requires the lock.
  Record* record_on(const Block* block) const noexcept {
    return static_cast<Record*>(memory_.tag(block));
  }
  struct Operand {
    Record* record;
    bool writes;
  };
  /// The records that an operator locks while it runs. The caller owns the frame from `begin` to `end`.
  struct Frame {
    std::vector<Record*> held;
    std::vector<std::pair<StorageId, std::size_t>> births;
    OperatorKey key = 0;
    const char* name = "";
    int device = -1;
    bool planned = false; ///< `begin` told the policy
    bool region = false; ///< see Operator
    bool counted = false; ///< included in Device::running

    bool holds(const Record& record) const {
      const bool by_place = record.operand < held.size() && held[record.operand] == &record;
      return by_place || std::ranges::find(held, &record) != held.end(); // `operand` may be another thread's
    }
    /// Prepares the frame for another operator; keeps the vectors' capacity.
    void reset() {
      held.clear();
      births.clear();
      key = 0;
      name = "";
      device = -1;
      planned = region = counted = false;
    }
  };
  struct Operator {
    OperatorKey key = 0;
    const char* name = "";
    bool in_place_ok = false;
    bool collective = false;
    bool region = false; ///< a compiled graph: its kernels are not watched and may use storages that are not operands
    bool surely_outermost = true; ///< certainly not nested in another operator, watched or not
  };
  /// Called before an outermost operator. Requires the lock. If a fetch fails, the operand is used on the host.
  /// \param streams the calling thread's current streams, indexed by device; needed for the operands' devices
  void begin(Frame& frame, const Operator& op, std::span<const Operand> operands,
             const std::vector<Stream>& streams) noexcept;
  /// Called before a nested operator. Operands that the outer operator does not hold are used where they are.
  void begin_nested(Frame& frame, std::span<const Operand> operands, const std::vector<Stream>& streams) noexcept;
  /// Adds an output of the operator, or of one nested in it, to the frame.
  void created(Frame& frame, Record* record, const std::vector<Stream>& streams) noexcept;
  /// Called after the operator. Requires the lock.
  void end(Frame& frame) noexcept;

  /// The storage was destroyed. Frees its host copy. The caller frees the device block and then calls `freed`.
  void destroyed(Record* record) noexcept;
  /// The storage that owned this block may have been destroyed while storages without a record still share the block.
  void expired(Block* block) noexcept;
  /// The device block of a destroyed storage has been freed. Takes no lock.
  void freed() noexcept;

  /// Materialises a storage whose pointer is about to escape PyTorch. On return the bytes are complete and count as
  /// written; the address stays valid until the next operator.
  void settle(Record* record);
  /// Brings the storage to the device and pins it there until `release` was called as often as `hold`. A storage that a
  /// graph has captured is pinned where the graph uses it. Requires the lock.
  /// \return false if an operator uses the storage on the host; nothing has changed, retry once it has ended
  /// \throws OutOfMemory if there is no room; nothing has changed
  bool hold(Record* record, Stream stream);
  void release(Record* record) noexcept;

  // captures.cpp: a graph stores the addresses of captured storages, and its kernels are not watched.

  /// Until `end_capture`, storages that operators capture are pinned for this graph.
  /// \return the handle to pass to the functions below
  std::uint64_t begin_capture();
  void end_capture(std::uint64_t capture) noexcept;
  /// The graph was launched on the stream: its storages are in use there.
  void replayed(std::uint64_t capture, Stream stream);
  /// The graph was destroyed: unpins its storages.
  void release_capture(std::uint64_t capture) noexcept;
  /// Whether a capture is in progress. One relaxed load.
  bool has_open_captures() const noexcept {
    return open_captures_.load(std::memory_order_relaxed) != 0;
  }
  /// An operator without a frame is about to use the storage on the stream and may write to it. Its end is not
  /// reported, so the storage counts as unmovable for a while. Requires the lock.
  void used_unseen(Record& record, Stream stream) noexcept;

  /// Called instead of `begin` for an operator that is being captured: pins its operands where they are. Requires the
  /// lock.
  void captured(std::span<const Operand> operands) noexcept;

  /// For tests of the layers above. While on, every storage that can be evicted is evicted after each operator,
  /// whatever the budget. Needs a budget, since operators are watched only with one.
  void evict_after_operators(bool on);

  void mark_step();
  void start_recording(const std::string& path);
  void stop_recording();

  ResidencyStatistics statistics();
  void reset_statistics();

  /// Returns a violated invariant in words, or nullopt. For tests.
  std::optional<std::string> check();

  bool make_room(std::size_t bytes, Location home, Stream stream) override;
  bool may_exceed(std::size_t bytes, Location home) override;
  std::string explain(std::size_t bytes, Location home) noexcept override;

 private:
  friend class Lock;

  /// Allocated bytes during the running operator, without the engine's own fetches and evictions.
  struct Workspace {
    std::int64_t peak = 0;
    std::int64_t ours = 0; ///< bytes fetched minus bytes evicted since it began
  };

  /// Allocated bytes when the allocator was last queried.
  struct Allocated {
    std::size_t bytes = 0;
    std::uint64_t changes = ~std::uint64_t{0}; ///< the allocator's change counter at that time
  };

  /// Whether a device may become idle, and its state when it did (sleep.cpp).
  struct QuietPeriod {
    std::uint64_t since = 0; ///< the operator that last restarted the quiet period
    std::uint64_t next_look = 0;
    std::uint64_t misses = 0; ///< the policy's misses at that operator
    std::uint64_t overlap = 0; ///< the latest operator that began while another one ran
    std::int64_t rooms = 0; ///< statistics_.made_room.count at the latest look
    std::uint64_t write_backs = 0; ///< Device::write_backs_started at the latest look
    std::size_t peak = 0; ///< peak allocated bytes since eviction or a call for room last ended the quiet period
    std::size_t level = 0; ///< allocated bytes above which, plus a small margin, the quiet period restarts
    std::size_t alarm = 0; ///< allocated bytes above which the device wakes; 0: it has not become idle
    std::size_t other = 0; ///< allocated bytes without a record when the device became idle
    std::size_t unseen = 0; ///< allocated bytes without a record that were allocated while it was idle
    unsigned idle_periods = 0; ///< how often it has been idle
    unsigned seen = 0; ///< weighted count of operators since it woke
  };

  struct Device {
    std::optional<std::size_t> budget;
    std::size_t cap = 0; ///< limit on reserved segments: the budget without staging, rounded (cap_within)
    bool hard = false;
    bool asleep = false; ///< idle: operators are not watched
    bool settled = true; ///< quiescent: no unwatched operator runs; else nothing may be evicted
    QuietPeriod quiet;
    int running = 0; ///< running operators whose first operand is on this device
    std::unique_ptr<Policy> policy; ///< created with the first budget or capture
    Stream fetches;
    Stream write_backs;
    std::unique_ptr<Staging> incoming; ///< nullptr if staging was never needed
    std::unique_ptr<Staging> outgoing;
    std::deque<StorageId> pending; ///< the policy's fetches that have not started for want of room
    std::size_t fetched_ahead = 0; ///< bytes prefetched for the current schedule and not used yet
    std::uint64_t fetch_round = 0; ///< number of dropped schedules: their prefetches may never be used
    std::multimap<std::uint64_t, StorageId> unforeseen; ///< unscheduled evictions, by the operator to re-fetch them at
    unsigned pause = 0; ///< operators until the next search for room for `pending`
    unsigned next_pause = 0;
    struct Retirement {
      StorageId storage;
      std::uint64_t number; ///< differs from Record::retirement if the storage was used and retired again
    };
    std::deque<Retirement> retired; ///< in order of their write-backs; some may have been used again
    std::uint64_t retirements = 0;
    Workspace workspace;
    Allocated allocated;
    Stream last_stream; ///< of the latest operator: blocks with no work pending are freed to this stream's list
    std::uint64_t write_backs_started = 0;
    std::uint64_t write_backs_read = 0; ///< write-backs known to have finished reading the device copy
    bool exceeded = false; ///< the running operator has exceeded a hard budget
    unsigned regions = 0; ///< running compiled graphs
    bool excess = false; ///< the budget may be exceeded, by unwatched allocations or because it is soft
    std::uint64_t next_shrink = 0; ///< the operator after which to try to shrink to the budget
    std::uint64_t shrink_pause = 0;
  };

  struct Capture {
    bool open = true;
    std::unordered_set<StorageId> held;
    std::vector<Stream> streams; ///< that the graph was launched on
  };

  enum class Need { kNow, kAhead }; ///< an operator waits for the room, or it is for a prefetch

  // All functions below require the mutex.

  // budget.cpp
  /// The cap on segments within a budget.
  std::size_t cap_within(int device, std::size_t budget, std::size_t staged) const;
  std::size_t slot_bytes(int device, std::size_t budget) const;
  /// Creates the device's missing streams, all or none.
  void make_streams(int device, bool stages);
  /// \return the bytes of all slots together
  std::size_t stage(Device& device, std::size_t slot_bytes) noexcept;
  /// Fetches all storages of a device, waits for the copies and drops the host copies, since operators will no longer
  /// be watched. Waits for operators that use storages on the host.
  /// \throws OutOfMemory, RuntimeFailure; some storages may have been fetched by then
  void bring_back(int device, Lock& lock);
  /// The same, if everything fits into the budget and no storage is in use on the host. \return whether it was done
  bool is_brought_back(int device, Lock& lock);
  /// Releases cached segments and, if that is not enough, evicts what it can to bring the device within its cap.
  void shrink(int device);
  /// Updates the atomics that `is_awake`, `has_idle_devices` and `is_unsettled` read.
  void note_awake();
  /// Tries to return to an exceeded budget, at ever longer intervals.
  void keep_again(int device);
  /// After an operator that exceeded a hard budget: evicts its results, and more if needed, to return to the budget.
  void release_excess(const Frame& frame, int device);

  // explain.cpp
  /// Bytes of a device that cannot be evicted, by reason.
  struct Staying {
    std::size_t operands = 0; ///< the calling thread's operator uses them; includes those on the host
    std::size_t pinned = 0; ///< keep_resident, exports, captures
    std::size_t others = 0; ///< used by other threads' operators, or shared by several storages
    std::size_t unknown = 0; ///< without a record: too small to be moved, or allocated by running operators
  };
  Staying staying(int device, std::span<Record* const> held) const;
  /// The smallest budget whose cap holds that many bytes.
  std::size_t budget_for(int device, std::size_t bytes) const;

  // sleep.cpp
  /// Records the allocated bytes; a marked rise restarts the quiet period.
  void note_level(Device& device, std::size_t bytes);
  void restart_quiet(Device& device);
  /// Makes the device idle after enough quiet steps.
  void become_idle_if_quiet(int device);
  bool fall_asleep(int device);
  /// Counts an operator since the device woke, and checks whether it is quiescent.
  void settle_down(int device, bool surely_outermost);
  /// Whether operators that began unwatched may still run.
  bool may_run_unseen(const Device& device) const;
  /// Marks the device quiescent: no unwatched operator runs, so storages may be evicted from now on.
  void note_settled(int device);
  std::size_t allocated_bytes(int device) const;

  // relocation.cpp
  /// Whether the operator being begun holds the record and has not read its address yet.
  bool is_unread(const Record& record) const;
  bool address_may_change(const Record& record, Mover mover) const {
    return record.address_may_change(mover, is_unread(record) ? 1 : 0, operators_);
  }
  /// Whether the storage's address may change now. If so, keeps the storage alive until the lock is released.
  bool claim_address(Record& record, Mover mover);
  /// Marks the storage unmovable for `kFixedFor` operators. Storages that share its bytes may be freed in the meantime.
  void fix(Record& record) {
    record.fixed_until = operators_ + kFixedFor;
    found_fixed_ = true;
  }
  bool is_fixed(const Record& record) const {
    return operators_ < record.fixed_until;
  }
  /// If the storage shared its bytes and no longer does, marks the device copy dirty: a host copy may be outdated.
  void reclaim(Record& record);
  bool start_write_back(Record& record);
  /// Frees the device copy and points the storage at its host copy, which must be valid.
  /// \param taker the stream that will use the memory next; the host's if it is not known
  bool release_device_copy(Record& record, Stream taker);
  /// Frees the device copy, writing it back first if it is dirty. `taker`: as above. \return false if it stays
  bool evict(Record& record, Stream taker);
  bool start_fetch(Record& record, Need need, Stream stream);
  void mark_use(Record& record, bool writes) noexcept;
  /// Blocks the host until the record's copies are done. Used if a stream could not be made to wait.
  void wait_here(Record& record) noexcept;
  /// Points the storage at its device copy, fetching it if needed. \return false if the storage stays on the host
  bool bring_to_device(Record& record, Stream stream);
  void use_on_device(Record& record, Stream stream, bool writes);
  void use_in_place(Record& record, Stream stream, bool writes);
  void drop_host_copy(Record& record) noexcept;
  void abandon_fetch(Record& record) noexcept;
  /// Allocates pinned memory, dropping spare host copies if needed. nullptr if there is none.
  Block* host_block(std::size_t bytes, Stream stream);
  /// Makes `later` wait for the work queued on the `earlier` streams.
  void order(const std::vector<Stream>& earlier, Stream later);
  void note_move(TransferKind kind, const Record& record) noexcept;
  static double now_us();

  // room.cpp
  Block* room_for(std::size_t bytes, int device, Need need, Stream stream);
  /// Frees a contiguous range of `bytes` for `taker`: evicts at the least cost and relocates blocks within the device.
  bool evict_range(std::size_t bytes, int device, Need need, Stream taker);
  bool try_repeatedly_to_evict(std::size_t bytes, int device, Need need, Stream taker);
  /// Forgets which storages were found unmovable, so that they are tried again. \return whether there were any
  bool forget_fixed(int device);
  bool try_to_evict(std::size_t bytes, int device, Need need, Stream taker);
  bool evict_first_fit(std::size_t bytes, int device, Stream taker);
  /// Evicts everything that can be evicted. \return whether anything was
  bool evict_all(int device, Stream taker);
  /// Frees a retiring device copy of about the requested size. \return whether there was one
  bool evict_same_size(std::size_t bytes, int device, Stream taker);
  /// Frees the retiring device copies whose write-backs are done.
  void release_read_copies(int device);
  /// Whether the latest write-back has finished reading the device copy.
  bool is_read(Record& record);
  /// Cost of evicting the storage; infinity if it cannot be evicted.
  double cost_of(const Record& record, Need need);
  /// Whether the current schedule does not contain the storage and it was not used for a whole step.
  bool is_idle(const Record& record) const;
  /// Approaches 1 if the next use is near, 0 if it is far.
  double soonness(const Record& record);
  double price_of(const std::vector<Record*>& victims, Need need);
  /// The cheapest victims of `bytes` in total, anywhere on the device; empty if there are not enough.
  std::vector<Record*> cheapest_bytes(std::size_t bytes, int device, Need need);
  /// The allocator's min-cost eviction range of `bytes`.
  std::optional<std::vector<Record*>> min_cost_range(std::size_t bytes, int device, Need need);
  /// Whether another thread is about to free a storage's block on the device.
  bool something_goes(int device) const;
  bool evict_all(const std::vector<Record*>& victims, Stream taker);
  /// Free bytes for large blocks within the cap, possibly fragmented.
  std::size_t unused(int device) const;
  /// The record of a retirement, or nullptr if the storage was used or freed since.
  Record* retiring(const Device::Retirement& retirement) const;

  // move_aside.cpp
  /// Frees a contiguous range by relocating blocks within the device. \return false if that cannot be done
  bool move_aside(std::size_t bytes, int device, Stream taker);
  void move(const CachingManagedAllocator::Move& move, Stream taker);

  // prepare_room.cpp
  /// Makes contiguous room for results of the given sizes, all at once.
  /// \param left receives the operands that were evicted for it; the caller must provide them again
  void prepare_room(const Frame& frame, std::span<const std::size_t> pieces, Stream stream, std::vector<Record*>& left);
  /// Evicts the largest operand that can move, and fetches it to another place if one can be found.
  bool evict_one_operand(const Frame& frame, std::size_t bytes, Stream stream, std::vector<Record*>& left);

  // fetches_ahead.cpp
  void follow(const Decision& decision, int device);
  void forget_fetches(Device& device) noexcept;
  /// The prefetched storage was used, or its fetch abandoned: it no longer counts as fetched ahead.
  void no_longer_ahead(const Record& record) noexcept;
  void start_pending_fetches(int device, bool changed);
  /// Notes an eviction that was not scheduled, to fetch the storage again before its next use in the schedule.
  void fetch_again(const Record& record);
  /// Adds the noted re-fetches that are needed soon to `pending`, in order of need.
  void queue_unforeseen_fetches(int device);

  // operators.cpp
  void note_begin(Frame& frame, const Operator& op);
  /// Peak allocated bytes since the last call. Takes no lock if nothing was allocated since, which is the common case.
  std::int64_t take_allocated_peak(int device);
  void begin_workspace(int device);
  /// The engine itself has allocated that many bytes, or freed them if negative.
  void note_workspace(int device, std::int64_t bytes);
  std::size_t end_workspace(int device);
  /// Tells the policy and the recorder of the storage, once.
  void announce(Record& record);
  /// The accesses of the frame's operands on one device: each device has its own policy.
  std::span<const Access> accesses_on(int device, const Frame& frame);
  void take(Frame& frame, Record* record);
  /// Fallback if preparing an operand failed: blocks until the copy that the storage points at is complete.
  void without_the_runtime(Record& record, Stream stream, bool writes) noexcept;
  /// The same for an operand that may not be in the frame: it counts as unmovable for a while.
  void without_the_books(Record& record, Stream stream, bool writes) noexcept;
  void let_go(Frame& frame) noexcept;
  bool better_in_place(Record& record, const Operator& op);
  void use_where_it_is(Record& record, Stream stream, bool writes);

  /// See evict_after_operators.
  void evict_everything(int device);

  // captures.cpp
  void hold_address(Record& record);

  // check.cpp
  std::optional<std::string> check_records() const;

  // engine.cpp
  OutOfMemory no_room_to_hold(const Record& wanted) const;
  void wait(Stream stream, Event event);
  bool reached(Event& event) noexcept;
  void recycle_event(int device, Event& event) noexcept;
  void recycle_block_ready(Record& record) noexcept;
  /// Fires when the latest write-back has read the device copy. With staging the host copy is complete only later.
  Event& was_read(Record& record) {
    return record.block_ready ? record.block_ready : record.host_ready;
  }
  void unregister(Record* record) noexcept;
  void free_if_dead(Record* record) noexcept;
  Device& of(int device) {
    return devices_[static_cast<std::size_t>(device)];
  }
  Record* find(StorageId id) const;

  ManagedRuntime& runtime_;
  CachingManagedAllocator& memory_;
  StorageAdapter& storages_;
  mutable std::mutex mutex_;
  std::condition_variable freed_; ///< the block of a destroyed storage was freed; notified without the mutex
  std::atomic<int> leaving_{0}; ///< blocks of destroyed storages that are not freed yet
  std::atomic<bool> awake_{false};
  std::atomic<bool> unsettled_{false};
  std::atomic<int> idle_devices_{0};
  std::atomic<int> unseen_graphs_{0};
  std::atomic<bool> stays_awake_{false};
  std::atomic<std::size_t> open_captures_{0};
  std::vector<Device> devices_;
  std::unique_ptr<CachingManagedAllocator> host_memory_; ///< pinned
  PinnedSegmentSource* host_source_ = nullptr;
  EventPool events_;
  Transfers transfers_;
  std::optional<std::size_t> staging_;
  ResidencyStatistics statistics_;
  std::unique_ptr<AccessRecorder> recorder_;
  FlatMap<Record*> records_; ///< by storage id
  StorageId next_id_ = 1;
  std::map<std::uint64_t, Capture> captures_;
  std::uint64_t next_capture_ = 1;
  std::uint64_t operators_ = 0;
  std::vector<Access> accesses_; ///< of the operator being begun
  std::vector<Access> told_; ///< those of `accesses_` on one device (accesses_on)
  std::int64_t hits_at_reset_ = 0;
  std::int64_t misses_at_reset_ = 0;
  std::int64_t failures_ = 0;
  bool evicts_after_operators_ = false;
  bool found_fixed_ = false; ///< a storage turned out to be unmovable since the flag was last cleared
  const Frame* beginning_ = nullptr; ///< of the operator whose operands `begin` is placing
  bool no_room_ahead_ = false; ///< a prefetch for the operator being begun found no room
  bool host_refused_ = false; ///< the latest write-back found no pinned memory
  std::vector<void*> kept_; ///< storages whose references are dropped after the mutex is released
};

} // namespace torch_uvm
