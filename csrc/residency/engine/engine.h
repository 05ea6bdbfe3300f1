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
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "residency/engine/record.h"
#include "residency/engine/residency_statistics.h"
#include "residency/engine/storage_adapter.h"
#include "residency/policy/decision.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

class ResidencyEngine;

class Engine {
 public:
  /// All arguments must outlive the engine. The process's engine is leaked on purpose: storages are freed after static
  /// destructors have run.
  static std::unique_ptr<Engine> make(ManagedRuntime& runtime, CachingManagedAllocator& memory,
                                      StorageAdapter& storages);
  virtual ~Engine() = default;

  /// Limits the managed memory that a device may reserve. nullopt: no budget; the driver migrates pages on demand.
  /// \param ceiling a single operator whose operands and results alone need more than the budget may exceed it up to
  ///        here: what the device has free. Beyond it, results are created on the host (create_on_host)
  virtual void set_budget(int device, std::optional<std::size_t> bytes,
                          std::size_t ceiling = CachingManagedAllocator::kNoCeiling) = 0;
  virtual std::optional<std::size_t> budget(int device) const = 0;
  /// Limits the pinned memory for host copies. nullopt: no limit. At the limit nothing more can be evicted.
  virtual void set_host_limit(std::optional<std::size_t> bytes) = 0;
  /// Size of each of the four staging slots in plain device memory. nullopt: derived from the budget, and none on
  /// devices that do not need staging; 0: no staging. Takes effect with the next `set_budget`.
  virtual void set_staging(std::optional<std::size_t> slot_bytes) = 0;

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
  virtual void note_allocation(int device) = 0;
  /// Makes an idle device active: its operators are watched from now on.
  virtual void wake(int device) = 0;
  /// Wakes the devices that are idle because their steps fit.
  virtual void wake_idle_devices() = 0;
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

    ResidencyEngine& engine_;
    std::unique_lock<std::mutex> lock_;
  };

  /// Creates the record of a storage that is seen for the first time. Requires the lock.
  virtual Record* adopt(Block* block, int device, void* storage) = 0;
  /// Whether operators of the device are watched: it has a budget and is active.
  virtual bool watches(int device) const = 0;
  /// The record of the storage on this block, or nullptr. Requires the lock.
  virtual Record* record_on(const Block* block) const noexcept = 0;
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
  virtual void begin(Frame& frame, const Operator& op, std::span<const Operand> operands,
                     const std::vector<Stream>& streams) noexcept = 0;
  /// Called before a nested operator. Operands that the outer operator does not hold are used where they are.
  virtual void begin_nested(Frame& frame, std::span<const Operand> operands,
                            const std::vector<Stream>& streams) noexcept = 0;
  /// Adds an output of the operator, or of one nested in it, to the frame.
  virtual void created(Frame& frame, Record* record, const std::vector<Stream>& streams) noexcept = 0;
  /// Called after the operator. Requires the lock.
  virtual void end(Frame& frame) noexcept = 0;

  /// Creates the record of a storage for which a device with a budget has no room: its bytes are in pinned memory.
  /// \return its record and address; null if the host has no memory either, or the device has no budget
  virtual std::pair<Record*, void*> create_on_host(std::size_t bytes, int device, Stream stream) = 0;
  /// The record of the storage created at the address; nullptr for others. Needs no lock.
  virtual Record* created_on_host_at(const void* ptr) const = 0;
  virtual void attach(Record& record, void* storage) noexcept = 0; ///< one of `create_on_host`; requires the lock
  /// No operator that began unwatched runs any more, as the interpreter knows.
  virtual void note_between_operators() noexcept = 0;

  /// The storage was destroyed. Frees its host copy. The caller frees the device block and then calls `freed`.
  virtual void destroyed(Record* record) noexcept = 0;
  /// The storage that owned this block may have been destroyed while storages without a record still share the block.
  virtual void expired(Block* block) noexcept = 0;
  /// The device block of a destroyed storage has been freed. Takes no lock.
  virtual void freed() noexcept = 0;

  /// Materialises a storage whose pointer is about to escape PyTorch. On return the bytes are complete and count as
  /// written, and used by the stream: they move only after its work. The address stays valid until the next operator.
  virtual void materialise(Record* record, Stream stream) = 0;
  /// Brings the storage to the device, also one without a budget, and pins it there until `unpin` was called as often
  /// as `pin`. A storage that a graph has captured is pinned where the graph uses it. Requires the lock.
  /// \return false if an operator uses the storage on the host; nothing has changed, retry once it has ended
  /// \throws OutOfMemory if there is no room; nothing has changed
  virtual bool pin(Record* record, Stream stream) = 0;
  virtual void unpin(Record* record) noexcept = 0;

  // captures.cpp: a graph stores the addresses of captured storages, and its kernels are not watched.

  /// Until `end_capture`, storages that operators capture are pinned for this graph.
  /// \return the handle to pass to the functions below
  virtual std::uint64_t begin_capture() = 0;
  virtual void end_capture(std::uint64_t capture) noexcept = 0;
  /// The graph is about to be launched on the stream: its storages are in use there.
  virtual void launched(std::uint64_t capture, Stream stream) = 0;
  /// The graph was destroyed: unpins its storages.
  virtual void release_capture(std::uint64_t capture) noexcept = 0;
  /// Whether a capture is in progress. One relaxed load.
  bool has_open_captures() const noexcept {
    return open_captures_.load(std::memory_order_relaxed) != 0;
  }
  /// An operator without a frame is about to use the storage on the stream and may write to it. Its end is not
  /// reported, so the storage counts as unmovable for a while. Requires the lock.
  virtual void used_unseen(Record& record, Stream stream) noexcept = 0;

  /// Called instead of `begin` for an operator that is being captured: pins its operands where they are. Requires the
  /// lock.
  virtual void captured(std::span<const Operand> operands) noexcept = 0;

  /// For tests of the layers above. While on, every storage that can be evicted is evicted after each operator,
  /// whatever the budget. Needs a budget, since operators are watched only with one.
  virtual void evict_after_operators(bool on) = 0;

  virtual void mark_step() = 0;
  virtual void start_recording(const std::string& path) = 0;
  virtual void stop_recording() = 0;

  virtual ResidencyStatistics statistics() = 0;
  /// The longest Policy::predicted_ms_per_operator. nullopt until each device with a budget follows a final schedule.
  virtual std::optional<double> predicted_ms_per_operator() = 0;
  virtual void reset_statistics() = 0;

  /// Returns a violated invariant in words, or nullopt. For tests.
  virtual std::optional<std::string> check() = 0;

  /// What the allocator calls when memory runs short.
  virtual PressureCallback& pressure_callback() = 0;

 protected:
  // Read without the engine's mutex.
  std::atomic<bool> awake_{false};
  std::atomic<bool> may_run_unwatched_{false};
  std::atomic<int> idle_devices_{0};
  std::atomic<int> unseen_graphs_{0};
  std::atomic<bool> stays_awake_{false};
  std::atomic<std::size_t> open_captures_{0};
};

} // namespace torch_uvm
