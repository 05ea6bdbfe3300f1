// The residency engine: keeps the device memory of managed storages within a budget by moving storages between the
// device and pinned host memory.
//
// - The engine is called before and after each outermost operator and carries out the policy's schedule: it prefetches
//   storages before their use and writes them back after it. Operands that the schedule missed are fetched on demand.
// - A device's budget is a cap on the allocator's segments. When an allocation does not fit under the cap, the
//   allocator calls back (PressureCallback) and the engine evicts the cheapest device copies that free a contiguous
//   range (room.cpp).
// - Copies are asynchronous. Prefetches and write-backs run on the engine's streams, fetches on demand on the stream of
//   the operator, all ordered by events with the streams that use the storage. The host waits before a pointer escapes
//   PyTorch (`materialise`), in a graph capture (`captured`), when a budget is set or lifted, when a device becomes
//   quiescent (`note_quiescent`), when an exceeded budget is reduced (`shrink`), and after a failure of the runtime.
// - The operands and results of a running operator do not move. Other storages may be evicted while it runs, when it
//   allocates.
//
// Lock order: the engine's mutex, then an allocator's, then the runtime's. The mutex is released before the engine
// drops its reference to a storage, since that may be the last reference. The engine calls no Python and never takes
// the GIL.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "residency/engine/engine_state.h"
#include "residency/engine/room.h"

namespace torch_uvm {

class Engine final : public PressureCallback {
 public:
  /// All arguments must outlive the engine. The process's engine is leaked on purpose: storages are freed after static
  /// destructors have run.
  Engine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages);

  /// Limits the managed memory that a device may reserve. nullopt: no budget; the driver migrates pages on demand.
  /// \param ceiling a single operator whose operands and results alone need more than the budget may exceed it up to
  ///        here: what the device has free. Beyond it, results are created on the host (create_on_host)
  void set_budget(int device, std::optional<std::size_t> bytes,
                  std::size_t ceiling = CachingManagedAllocator::kNoCeiling);
  std::optional<std::size_t> budget(int device) const;
  /// Limits the pinned memory for host copies. nullopt: no limit. At the limit nothing more can be evicted.
  void set_host_limit(std::optional<std::size_t> bytes);
  /// Size of each of the four staging slots in plain device memory. nullopt: derived from the budget, and none on
  /// devices that do not need staging; 0: no staging. Takes effect with the next `set_budget`.
  void set_staging(std::optional<std::size_t> slot_bytes);

  /// Whether any device needs its operators watched. One atomic load. A device becomes idle while its steps repeat and
  /// fit (sleep.cpp).
  bool is_awake() const noexcept {
    return awake_.load(std::memory_order_acquire);
  }
  /// Whether a device is idle because its steps fit. If so, call `note_allocation` after allocations. One relaxed load.
  bool has_idle_devices() const noexcept {
    return idle_devices_.load(std::memory_order_relaxed) != 0;
  }
  /// Whether unwatched operators may still run on a device that is or was idle. One relaxed load.
  bool may_run_unwatched() const noexcept {
    return may_run_unwatched_.load(std::memory_order_relaxed);
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
  void wake_idle_devices();
  /// The same, and keeps all devices from becoming idle again, until it is called with false.
  void stay_awake(bool stays) {
    if (stays_awake_.load(std::memory_order_relaxed) != stays && stays_awake_.exchange(stays) != stays && stays) {
      wake_idle_devices();
    }
  }

  /// Holds the engine's mutex, which guards the records. On release it drops the storage references collected in
  /// `locked_`, after unlocking.
  class Lock {
   public:
    explicit Lock(Engine& engine);
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
  bool watches(int device) const;
  /// The record of the storage on this block, or nullptr. Requires the lock.
  Record* record_on(const Block* block) const noexcept;
  struct Operand {
    Record* record;
    bool writes;
  };
  /// The records that an operator locks while it runs. The caller owns the frame from `begin` to `end`.
  struct Frame {
    std::vector<Record*> operands;
    std::vector<std::pair<StorageId, std::size_t>> births; ///< with the bytes that their blocks take
    OperatorKey key = 0;
    const char* name = "";
    int device = -1;
    std::size_t loop = 0; ///< of the device's
    const Thread* thread = nullptr; ///< nullptr: the loop is that of the operands. So it is in a backward, whose thread
                                    ///< works for all threads of the program
    bool planned = false; ///< `begin` told the policy
    bool region = false; ///< see Operator
    bool counted = false; ///< included in Device::running

    bool uses(const Record& record) const {
      const bool by_place = record.operand < operands.size() && operands[record.operand] == &record;
      return by_place || std::ranges::find(operands, &record) != operands.end(); // `operand` may be another thread's
    }
    /// Prepares the frame for another operator; keeps the vectors' capacity.
    void reset() {
      operands.clear();
      births.clear();
      key = 0;
      name = "";
      device = -1;
      loop = 0;
      thread = nullptr;
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

  /// Creates the record of a storage for which a device with a budget has no room: its bytes are in pinned memory.
  /// \return its record and address; null if the host has no memory either, or the device has no budget
  std::pair<Record*, void*> create_on_host(std::size_t bytes, int device, Stream stream);
  /// The record of the storage created at the address; nullptr for others. Needs no lock.
  Record* created_on_host_at(const void* ptr) const;
  void attach(Record& record, void* storage) noexcept; ///< one of `create_on_host`; requires the lock
  /// No operator that began unwatched runs any more, as the interpreter knows.
  void note_between_operators() noexcept;

  /// The storage was destroyed. Frees its host copy. The caller frees the device block and then calls `freed`.
  void destroyed(Record* record) noexcept;
  /// The storage that owned this block may have been destroyed while storages without a record still share the block.
  void expired(Block* block) noexcept;
  /// The device block of a destroyed storage has been freed. Takes no lock.
  void freed() noexcept;

  /// Materialises a storage whose pointer is about to escape PyTorch. On return the bytes are complete and count as
  /// written, and used by the stream: they move only after its work. The address stays valid until the next operator.
  void materialise(Record* record, Stream stream);
  /// Brings the storage to the device, also one without a budget, and pins it there until `unpin` was called as often
  /// as `pin`. A storage that a graph has captured is pinned where the graph uses it. Requires the lock.
  /// \param waits whether the caller waits for operators that use what is in the way
  /// \return false if an operator uses the storage on the host, or `waits`; nothing has changed, retry once it has
  /// ended
  /// \throws OutOfMemory if there is no room; nothing has changed
  bool pin(Record* record, Stream stream, bool waits = false);
  void unpin(Record* record) noexcept;

  // captures.cpp: a graph stores the addresses of captured storages, and its kernels are not watched.

  /// Until `end_capture`, storages that operators capture are pinned for this graph.
  /// \return the handle to pass to the functions below
  std::uint64_t begin_capture();
  void end_capture(std::uint64_t capture) noexcept;
  /// The graph is about to be launched on the stream: its storages are in use there.
  void launched(std::uint64_t capture, Stream stream);
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

  /// \param frame of an operator of the thread that ends a step; likewise below
  void mark_step(const Frame& frame);
  void start_recording(const std::string& path);
  void stop_recording();

  ResidencyStatistics statistics();
  /// Whether the thread's loops follow a final schedule on each device with a budget.
  bool is_settled(const Frame& frame);
  void reset_statistics();

  /// Returns a violated invariant in words, or nullopt. For tests.
  std::optional<std::string> check();

  // pressure.cpp, explain.cpp: what the allocator calls when memory runs short.

  bool make_room(std::size_t bytes, Location home, Stream stream) override;
  bool never_moves(std::size_t bytes) const override;
  void make_room_for_small(std::size_t bytes, Location home, Stream stream) override;
  bool may_exceed(std::size_t bytes, Location home) override;
  void waits_for_memory(Stream stream, const std::function<void()>& queue) override;
  std::string explain(std::size_t bytes, Location home) noexcept override;

 private:
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
  /// Managed bytes reserved on the device beyond the budget.
  std::size_t over_cap(int device);
  /// Releases cached segments and, if that is not enough, evicts what it can to bring the device within its cap.
  void shrink(int device);
  /// Updates the atomics that `is_awake`, `has_idle_devices` and `may_run_unwatched` read.
  void note_awake();
  /// Tries to return to an exceeded budget, at ever longer intervals.
  void retry_budget(int device);
  /// After an operator that exceeded the budget: evicts its results, and more if needed, to return to the budget.
  void release_excess(const Frame& frame, int device);

  // explain.cpp
  /// Bytes of a device that cannot be evicted, by reason.
  struct Staying {
    std::size_t operands = 0; ///< the calling thread's operator uses them; includes those on the host
    std::size_t pinned = 0; ///< keep_resident, exports, captures
    std::size_t others = 0; ///< used by other threads' operators, or shared by several storages
    std::size_t unknown = 0; ///< without a record: too small to be moved, or allocated by running operators
  };
  Staying staying(int device, std::span<Record* const> operands) const;
  /// The smallest budget whose cap holds that many bytes.
  std::size_t budget_for(int device, std::size_t bytes) const;

  // fetches_ahead.cpp
  void follow(const Decision& decision, int device);
  /// Starts what the decision writes back or retires.
  void write_back(const Decision& decision, int device);
  /// The record of a storage that may be written back now and leave later; nullptr: it may not.
  Record* leaving(StorageId id);
  /// Frees the retiring device copies whose write-backs are done.
  /// \param latest the latest write-back that may be done
  void release_read_copies(int device, std::uint64_t latest);
  /// The record of a pending fetch that is still needed and may start; nullptr: none.
  Record* wanted(const Device::Fetch& pending) const;
  /// Whether so many bytes more may be prefetched now.
  static bool may_fetch_ahead(const Device& device, std::size_t bytes);
  static void forget_fetches(Device& device) noexcept;
  void start_pending_fetches(int device, bool changed);
  /// Adds the noted re-fetches that are needed soon to `pending`, in order of need.
  void queue_unforeseen_fetches(int device);

  // sleep.cpp
  /// Whether an idle device that wakes at that many allocated bytes has room to spare within its cap.
  static bool leaves_room(const Device& device, std::size_t alarm);
  /// Makes the device idle after enough quiet steps.
  void become_idle_if_quiet(int device);
  bool make_idle(int device);
  /// `become_idle_if_quiet` for operators that use no storages with records.
  void look_for_quiet_devices();
  /// Counts an operator since the device woke, and checks whether it is quiescent.
  void count_since_wake(int device, bool surely_outermost);
  /// Whether operators that began unwatched may still run.
  bool may_run_unseen(const Device& device) const;
  /// Marks the device quiescent: no unwatched operator runs, so storages may be evicted from now on.
  void note_quiescent(int device);

  // recording.cpp
  /// Before an operator that is recorded. Two iterations are recorded at the program's own pace, the others at the
  /// device's, unless there are transfers: that would change them.
  void let_host_get_ahead(const Device& device) noexcept;

  // pressure.cpp
  /// Whether another thread is about to free a storage's block on the device.
  bool is_block_being_freed(int device) const;

  // operators.cpp
  std::size_t loop_of(const Frame& frame, int device, std::span<const Operand> operands = {});
  void note_begin(Frame& frame, const Operator& op);
  /// The accesses of the frame's operands on one device: each device has its own policy.
  std::span<const Access> accesses_on(int device, const Frame& frame);
  void add_operand(Frame& frame, Record* record);
  /// Fallback if preparing an operand failed: blocks until the copy that the storage points at is complete.
  void use_after_failed_preparation(Record& record, Stream stream, bool writes) noexcept;
  /// The same for an operand that may not be in the frame: it counts as unmovable for a while.
  void use_untracked(Record& record, Stream stream, bool writes) noexcept;
  void release_operands(Frame& frame) noexcept;
  bool choose_in_place(Record& record, const Operator& op);
  void use_where_it_is(Record& record, Stream stream, bool writes);

  // captures.cpp
  void pin_address(Record& record);

  // check.cpp
  std::optional<std::string> check_records() const;

  // engine.cpp
  void count_pin(Record& record);
  struct Held {
    std::size_t pinned = 0;
    std::size_t used = 0; ///< by operators that run
  };
  Held bytes_on(int device) const;
  OutOfMemory no_room_to_pin(const Record& wanted) const;
  void unregister(Record* record) noexcept;
  void free_if_dead(Record* record) noexcept;

  EngineState state_;
  Copies copies_;
  Room room_;

  mutable std::mutex mutex_;
  std::atomic<std::thread::id> holder_; ///< the thread that has a `Lock`
  std::condition_variable freed_; ///< the block of a destroyed storage was freed; notified without the mutex
  std::atomic<int> blocks_being_freed_{0}; ///< blocks of destroyed storages that are not freed yet
  std::optional<std::size_t> staging_;
  StorageId next_id_ = 1;
  std::map<std::uint64_t, Capture> captures_;
  std::uint64_t next_capture_ = 1;
  std::vector<Access> accesses_; ///< of the operator being begun
  std::vector<Access> told_; ///< those of `accesses_` on one device (accesses_on)
  std::int64_t hits_at_reset_ = 0;
  std::int64_t misses_at_reset_ = 0;
  bool evicts_after_operators_ = false;
  bool no_room_ahead_ = false; ///< a prefetch for the operator being begun found no room

  // Read without the engine's mutex.
  std::atomic<bool> awake_{false};
  std::atomic<bool> may_run_unwatched_{false};
  std::atomic<int> idle_devices_{0};
  std::atomic<int> unseen_graphs_{0};
  std::atomic<bool> stays_awake_{false};
  std::atomic<std::size_t> open_captures_{0};
};

} // namespace torch_uvm
