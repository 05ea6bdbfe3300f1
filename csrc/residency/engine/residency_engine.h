// The implementation of Engine. Its parts are explained in engine_state.h; which file adds what is said below.
#pragma once

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

class ResidencyEngine final : public Engine, public PressureCallback {
 public:
  ResidencyEngine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageAdapter& storages);

  // See Engine.
  void set_budget(int device, std::optional<std::size_t> bytes, std::size_t ceiling) override;
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
  std::pair<Record*, void*> create_on_host(std::size_t bytes, int device, Stream stream) override;
  Record* created_on_host_at(const void* ptr) const override;
  void attach(Record& record, void* storage) noexcept override;
  void note_between_operators() noexcept override;
  void destroyed(Record* record) noexcept override;
  void expired(Block* block) noexcept override;
  void freed() noexcept override;
  void materialise(Record* record, Stream stream) override;
  bool pin(Record* record, Stream stream) override;
  void unpin(Record* record) noexcept override;
  std::uint64_t begin_capture() override;
  void end_capture(std::uint64_t capture) noexcept override;
  void launched(std::uint64_t capture, Stream stream) override;
  void release_capture(std::uint64_t capture) noexcept override;
  void used_unseen(Record& record, Stream stream) noexcept override;
  void captured(std::span<const Operand> operands) noexcept override;
  void evict_after_operators(bool on) override;
  void mark_step() override;
  void start_recording(const std::string& path) override;
  void stop_recording() override;
  ResidencyStatistics statistics() override;
  std::optional<double> predicted_ms_per_operator() override;
  void reset_statistics() override;
  std::optional<std::string> check() override;

  PressureCallback& pressure_callback() override {
    return *this;
  }
  bool make_room(std::size_t bytes, Location home, Stream stream) override;
  bool make_room_among_small(std::size_t bytes, Location home, Stream stream) override;
  bool may_exceed(std::size_t bytes, Location home) override;
  void waits_for_memory(Stream stream, const std::function<void()>& queue) override;
  std::string explain(std::size_t bytes, Location home) noexcept override;

 private:
  friend class Lock;

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
  /// Whether the managed memory reserved on the device exceeds the budget.
  bool is_over_cap(int device);
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
  /// Before an operator that is recorded: makes an idle device wait.
  void let_host_get_ahead(const Device& device) noexcept;

  // pressure.cpp
  /// Whether another thread is about to free a storage's block on the device.
  bool is_block_being_freed(int device) const;

  // operators.cpp
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

  // residency_engine.cpp
  void count_pin(Record& record);
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
};

} // namespace torch_uvm
