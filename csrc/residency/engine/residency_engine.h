// The implementation of Engine: its state, and what each file of this folder adds.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "allocator/events.h"
#include "residency/engine/device_state.h"
#include "residency/engine/engine.h"
#include "residency/engine/relocation_min.h"
#include "residency/engine/transfers.h"
#include "residency/policy/flat_map.h"
#include "residency/trace/access_recorder.h"
#include "residency/trace/allocation_sites.h"
#include "residency/trace/operator_timer.h"

namespace torch_uvm {

/// Number of operators for which a storage counts as unmovable after an attempt to move it failed.
inline constexpr std::uint64_t kUnmovableFor = 64;

class ResidencyEngine final : public Engine, public PressureCallback {
 public:
  ResidencyEngine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages);

  // See Engine.
  void set_budget(int device, std::optional<std::size_t> bytes, bool hard) override;
  std::optional<std::size_t> budget(int device) const override;
  void set_host_limit(std::optional<std::size_t> bytes) override;
  void set_staging(std::optional<std::size_t> slot_bytes) override;
  void note_allocation(int device) override;
  void wake(int device) override;
  void wake_idle_devices() override;
  Record* adopt(Block* block, int device, void* storage) override;
  bool watches(int device) const override;
  Record* record_on(const Block* block) const noexcept override;
  void begin(Frame& frame, const Operator& op, std::span<const Operand> operands,
             const std::vector<Stream>& streams) noexcept override;
  void begin_nested(Frame& frame, std::span<const Operand> operands,
                    const std::vector<Stream>& streams) noexcept override;
  void created(Frame& frame, Record* record, const std::vector<Stream>& streams) noexcept override;
  void end(Frame& frame) noexcept override;
  void destroyed(Record* record) noexcept override;
  void expired(Block* block) noexcept override;
  void freed() noexcept override;
  void materialise(Record* record) override;
  bool pin(Record* record, Stream stream) override;
  void unpin(Record* record) noexcept override;
  std::uint64_t begin_capture() override;
  void end_capture(std::uint64_t capture) noexcept override;
  std::vector<Operand> launched(std::uint64_t capture, Stream stream) override;
  void release_capture(std::uint64_t capture) noexcept override;
  void used_unseen(Record& record, Stream stream) noexcept override;
  void captured(std::span<const Operand> operands) noexcept override;
  void evict_after_operators(bool on) override;
  void mark_step() override;
  void start_recording(const std::string& path) override;
  void stop_recording() override;
  ResidencyStatistics statistics() override;
  bool schedules_are_settled() override;
  void reset_statistics() override;
  std::optional<std::string> check() override;

  PressureCallback& pressure_callback() override {
    return *this;
  }
  bool make_room(std::size_t bytes, Location home, Stream stream) override;
  bool may_exceed(std::size_t bytes, Location home) override;
  void waits_for_memory(Stream stream, const std::function<void()>& queue) override;
  std::string explain(std::size_t bytes, Location home) noexcept override;

 private:
  friend class Lock;

  /// What room is needed for: an operator that waits, a prefetch, or a storage that has to stay on the device (it may
  /// then move other blocks aside, and evict nothing). kAnyway: an operator that cannot run otherwise; for ranges only.
  enum class Need { kNow, kAhead, kToStay, kAnyway };

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
  /// Whether the managed memory reserved on the device exceeds the budget.
  bool is_over_cap(int device);
  /// Releases cached segments and, if that is not enough, evicts what it can to bring the device within its cap.
  void shrink(int device);
  /// Updates the atomics that `is_awake`, `has_idle_devices` and `may_run_unwatched` read.
  void note_awake();
  /// Tries to return to an exceeded budget, at ever longer intervals.
  void retry_budget(int device);
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
  Staying staying(int device, std::span<Record* const> operands) const;
  /// The smallest budget whose cap holds that many bytes.
  std::size_t budget_for(int device, std::size_t bytes) const;

  // sleep.cpp
  /// Records the allocated bytes; a marked rise restarts the quiet period.
  void note_level(Device& device, std::size_t bytes);
  void restart_quiet(Device& device);
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
  std::size_t allocated_bytes(int device) const;

  // relocation.cpp
  /// Whether the operator being begun holds the record and has not read its address yet.
  bool is_unread(const Record& record) const;
  bool address_may_change(const Record& record, Mover mover) const {
    return record.address_may_change(mover, is_unread(record) ? 1 : 0, operators_);
  }
  /// Whether the storage's address may change now. If so, keeps the storage alive until the lock is released.
  bool claim_address(Record& record, Mover mover);
  /// Marks the storage unmovable for `kUnmovableFor` operators. Storages that share its bytes may be freed in the
  /// meantime.
  void mark_unmovable(Record& record) {
    record.unmovable_until = operators_ + kUnmovableFor;
    found_unmovable_ = true;
  }
  bool is_unmovable(const Record& record) const {
    return operators_ < record.unmovable_until;
  }
  /// If the storage shared its bytes and no longer does, marks the device copy dirty: a host copy may be outdated.
  void take_sole_ownership(Record& record);
  /// Adds the streams that the allocator knows for the device copy to the record's owners.
  void note_owners(Record& record);
  /// Tells the allocator that the owners use the device copy, which is in a new block.
  void record_owners(const Record& record);
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
  bool bring_to_device(Record& record, Stream stream, Need need = Need::kNow);
  void use_on_device(Record& record, Stream stream, bool writes);
  void use_in_place(Record& record, Stream stream, bool writes);
  void drop_host_copy(Record& record) noexcept;
  void abandon_fetch(Record& record) noexcept;
  /// Allocates pinned memory, dropping spare host copies if needed. nullptr if there is none.
  Block* host_block(std::size_t bytes, Stream stream);
  /// Whether `host_ready` has fired or there is nothing to wait for. If not, make a stream wait for it.
  bool is_host_copy_ready(Record& record);
  /// Makes `later` wait for the work queued on the `earlier` streams.
  void order(const std::vector<Stream>& earlier, Stream later);
  void note_move(TransferKind kind, const Record& record) noexcept;
  static double now_us();

  // ranges.cpp
  /// Gives the storage's range memory, evicting others if needed. \return the range, or nullptr if there is no room
  Block* memory_for(Record& record, Need need, Stream stream);
  /// Takes the range's memory away after the host has waited for its users. Changes no pointer. \throws the runtime's
  /// errors, and the memory stays
  void take_memory(Record& record);
  /// The same after a fetch that failed or is not wanted. If that fails, too, the range keeps memory that nobody uses
  /// until the next fetch.
  void take_unused_memory(Record& record, Stream stream) noexcept;
  /// The range is about to be freed by its owner: its memory stays until the write-back has read it.
  void keep_until_read(Record& record) noexcept;
  /// Records the event after which nothing uses the device copy: the write-back, or all uses since.
  void note_last_use(Record& record);
  /// Whether a stream has used the device copy since its write-back began.
  bool is_used_since(const Record& record) const;
  /// Brings an operand with a range to the device, beyond the budget if it does not fit.
  bool bring_anyway(Record& record, Stream stream);
  /// Points a storage with a range at its host copy, because its memory cannot be had.
  void show_pinned(Record& record);
  bool evict_for_range(std::size_t bytes, int device, Need need, Stream taker);

  // room.cpp
  Block* room_for(std::size_t bytes, int device, Need need, Stream stream);
  /// Frees a contiguous range of `bytes` for `taker`: evicts at the least cost and relocates blocks within the device.
  bool evict_range(std::size_t bytes, int device, Need need, Stream taker);
  bool try_repeatedly_to_evict(std::size_t bytes, int device, Need need, Stream taker);
  /// Forgets which storages were found unmovable, so that they are tried again. \return whether there were any
  bool forget_unmovable(int device);
  bool try_to_evict(std::size_t bytes, int device, Need need, Stream taker);
  bool evict_first_fit(std::size_t bytes, int device, Stream taker);
  /// Evicts everything that can be evicted. \return whether anything was
  bool evict_all(int device, Stream taker);
  /// Frees a retiring device copy of about the requested size. \return whether there was one
  bool evict_same_size(std::size_t bytes, int device, Stream taker);
  /// Whether the latest write-back has finished reading the device copy.
  bool is_read(Record& record);
  /// Cost of evicting the storage; infinity if it cannot be evicted.
  double cost_of(const Record& record, Need need);
  /// Whether the current schedule does not contain the storage and it was not used for a whole step.
  bool is_unused_by_step(const Record& record) const;
  /// Approaches 1 if the next use is near, 0 if it is far.
  double soonness(const Record& record);
  double price_of(const std::vector<Record*>& victims, Need need);
  /// The cheapest victims of `bytes` in total, anywhere on the device; empty if there are not enough.
  std::vector<Record*> cheapest_bytes(std::size_t bytes, int device, Need need);
  /// The allocator's min-cost eviction range of `bytes`.
  std::optional<std::vector<Record*>> min_cost_range(std::size_t bytes, int device, Need need);
  /// Whether another thread is about to free a storage's block on the device.
  bool is_block_being_freed(int device) const;
  bool evict_all(const std::vector<Record*>& victims, Stream taker);
  /// The record of a retirement, or nullptr if the storage was used or freed since.
  Record* retiring(const Device::Retirement& retirement) const;

  // move_aside.cpp
  /// Frees a contiguous range by relocating blocks within the device. \return false if that cannot be done
  bool move_aside(std::size_t bytes, int device, Stream taker);
  /// The same by pushing neighbours together, if that costs at most `limit`, in the unit of cost_of.
  bool slide(std::size_t bytes, int device, Stream taker, double limit);
  /// Cost of relocating a block, in bytes; infinity if it has no record or cannot move.
  double cost_to_move(const Record* record, std::size_t block_bytes) const;
  /// Whether the storage's block may move now. If so, it is not freed until the lock is released.
  bool claim_move(Record& record);
  void move(const CachingManagedAllocator::Move& move, Stream taker);
  /// Copies within a device; the ranges may overlap. \return an event for the end; empty: it is done
  /// \throws the runtime's errors, and the bytes are still at `from`
  Event copy_within(void* to, const void* from, std::size_t bytes, Stream stream);

  // prepare_room.cpp
  /// Makes contiguous room for results of the given sizes, all at once.
  /// \param left receives the operands that were evicted for it; the caller must provide them again
  void prepare_room(const Frame& frame, std::span<const std::size_t> pieces, Stream stream, std::vector<Record*>& left);
  /// Evicts the largest operand that can move, and fetches it to another place if one can be found.
  bool evict_one_operand(const Frame& frame, std::size_t bytes, Stream stream, std::vector<Record*>& left);

  // fetches_ahead.cpp
  void follow(const Decision& decision, int device);
  void retire_and_release(std::span<const StorageId> storages, int device);
  /// Frees the retiring device copies whose write-backs are done.
  /// \param latest the latest write-back that may be done
  void release_read_copies(int device, std::uint64_t latest);
  /// Whether a pending fetch is still needed and may start.
  bool is_wanted(const Record& pending) const;
  /// Whether so many bytes more may be prefetched now.
  bool may_fetch_ahead(const Device& device, std::size_t bytes) const;
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
  void unpin_address(Record& record) noexcept;
  void pin_for(Capture& capture, Record& record, bool writes);

  // check.cpp
  std::optional<std::string> check_records() const;

  // residency_engine.cpp
  void count_pin(Record& record);
  OutOfMemory no_room_to_pin(const Record& wanted) const;
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
  std::atomic<std::thread::id> holder_; ///< the thread that has a `Lock`
  std::condition_variable freed_; ///< the block of a destroyed storage was freed; notified without the mutex
  std::atomic<int> blocks_being_freed_{0}; ///< blocks of destroyed storages that are not freed yet
  std::vector<Device> devices_;
  std::unique_ptr<CachingManagedAllocator> host_memory_; ///< pinned
  PinnedSegmentSource* host_source_ = nullptr;
  EventPool events_;
  Transfers transfers_;
  std::optional<std::size_t> staging_;
  ResidencyStatistics statistics_;
  std::unique_ptr<AccessRecorder> recorder_;
  std::unique_ptr<OperatorTimer> operator_timer_; ///< while there is a recorder

  /// A scope in which the engine queues work of its own on an operator's stream.
  class Untimed {
   public:
    Untimed(ResidencyEngine& engine, Stream stream)
        : recording_(engine.operator_timer_.get(), stream), scheduling_(engine.timer_of(stream.device), stream) {}

   private:
    OperatorTimer::Pause recording_;
    OperatorTimer::Pause scheduling_;
  };
  OperatorTimer* timer_of(int device) {
    return device >= 0 && of(device).durations ? of(device).durations->timer() : nullptr;
  }
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
  bool found_unmovable_ = false; ///< a storage turned out to be unmovable since the flag was last cleared
  const Frame* beginning_ = nullptr; ///< of the operator whose operands `begin` is placing
  bool no_room_ahead_ = false; ///< a prefetch for the operator being begun found no room
  bool host_refused_ = false; ///< the latest write-back found no pinned memory
  /// While storages retire and their copies are released after an operator: the operator's stream, which is not idle
  /// yet; else the host's. Nothing is queued to it meanwhile, and no storage that moves is in use. So one wait of each
  /// other stream for it (`behind_`) is enough.
  Stream just_used_;
  std::vector<Stream> behind_;
  std::vector<void*> locked_; ///< storages whose references are dropped after the mutex is released
};

} // namespace torch_uvm
