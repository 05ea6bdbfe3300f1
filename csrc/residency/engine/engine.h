// The residency engine: keeps what managed storages have on a device within its budget, and the bytes right.
//
// - It is told of each outermost operator before and after it runs, and carries out what the policy says: fetches
//   ahead, writes back behind. What an operator needs and the policy did not foresee is fetched on demand.
// - A device's budget is a cap on the allocator's segments. When the allocator runs against it the engine is asked
//   for room (RoomMaker) and gives up device copies, neighbours in memory, those used last first.
// - Bytes travel by asynchronous copies on streams of the engine's own, ordered by events with the streams that
//   use the storage. The host waits for nothing but an address that leaves PyTorch (`settle`).
// - A storage's pointer changes only between operators: what a running operator uses, or has made, stays.
//
// Lock order: the engine's mutex, then an allocator's, then the runtime's. It is let go of before a storage that
// only the engine kept alive is let go of. No Python is called and no GIL is taken.
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
#include "residency/engine/storage_door.h"
#include "residency/engine/transfers.h"
#include "residency/policy/flat_map.h"
#include "residency/policy/policy.h"
#include "residency/trace/access_recorder.h"
#include "residency/trace/origins.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Operators until a storage that could not be moved is tried again.
inline constexpr std::uint64_t kFixedFor = 64;

class Engine final : public RoomMaker {
 public:
  /// Both are to outlive the engine, which is leaked on purpose: storages die after every static destructor.
  Engine(ManagedRuntime& runtime, CachingManagedAllocator& memory, StorageDoor& door);

  /// Device-resident bytes of managed tensors that a device may have; nullopt: as the driver has it.
  /// \param hard beyond it there is OutOfMemory; else it is exceeded where nothing can be given up
  void set_budget(int device, std::optional<std::size_t> bytes, bool hard);
  std::optional<std::size_t> budget(int device) const;
  /// Pinned memory for host copies; nullopt: what the host has. At it nothing more can leave the device.
  void set_host_limit(std::optional<std::size_t> bytes);
  /// Of plain device memory for copies, in each of four slots; nullopt: where the device needs it, as the budget is;
  /// 0: none. In force from the next budget on.
  void set_staging(std::optional<std::size_t> slot_bytes);

  /// One atomic load: whether operators of any device are watched. A budget that is not hard is asleep until memory
  /// has run short once, and every one while steps repeat and fit (sleep.cpp).
  bool is_awake() const noexcept {
    return awake_.load(std::memory_order_acquire);
  }
  /// One relaxed load: whether a device sleeps because its steps fit. Then `note_allocation` is to be called.
  bool has_sleepers() const noexcept {
    return sleepers_.load(std::memory_order_relaxed) != 0;
  }
  /// One relaxed load: whether a device has slept, and operators that began unseen may still run.
  bool is_unsettled() const noexcept {
    return unsettled_.load(std::memory_order_relaxed);
  }
  /// A compiled graph runs that began while a device slept; it ends.
  void begin_unseen_graph() noexcept {
    ++unseen_graphs_;
  }
  void end_unseen_graph() noexcept {
    --unseen_graphs_;
  }
  /// Managed memory of a device was given out.
  void note_allocation(int device);
  /// Operators are to be seen from now on.
  void wake(int device);
  /// Wakes what sleeps because its steps fit.
  void wake_resting();
  /// ... and lets nothing fall asleep any more.
  void stay_awake() {
    if (!stays_awake_.load(std::memory_order_relaxed) && !stays_awake_.exchange(true)) {
      wake_resting();
    }
  }

  /// The lock under which records are looked up; what the engine kept alive is let go of after it.
  class Lock {
   public:
    explicit Lock(Engine& engine) : engine_(engine), lock_(engine.mutex_) {}
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    /// Lets go of it until a block is freed, or for a moment.
    void wait_for_a_block();

   private:
    void release();

    Engine& engine_;
    std::unique_lock<std::mutex> lock_;
  };

  /// A storage that is seen for the first time. With the lock held.
  Record* adopt(Block* block, int device, void* storage);
  /// Whether storages of a device are watched.
  bool watches(int device) const {
    const Device& asked = devices_[static_cast<std::size_t>(device)];
    return asked.budget && !asked.asleep;
  }
  /// Whether they are known, be they watched or not.
  bool knows(int device) const {
    return devices_[static_cast<std::size_t>(device)].budget.has_value();
  }
  /// Of the storage that has this block; nullptr: it has none. With the lock held.
  Record* record_on(const Block* block) const noexcept {
    return static_cast<Record*>(memory_.tag(block));
  }
  struct Operand {
    Record* record;
    bool writes;
  };
  /// What an operator holds while it runs; the caller keeps it from `begin` to `end`.
  struct Frame {
    std::vector<Record*> held;
    std::vector<std::pair<StorageId, std::size_t>> births;
    OperatorKey key = 0;
    const char* name = "";
    int device = -1;
    bool planned = false; ///< the policy was told
    bool region = false; ///< see Operator
    bool counted = false; ///< among those that run

    bool holds(const Record& record) const {
      const bool by_place = record.operand < held.size() && held[record.operand] == &record;
      return by_place || std::ranges::find(held, &record) != held.end(); // another operator may use it, too
    }
    /// For another operator; what memory it has stays.
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
    bool region = false; ///< a compiled graph: kernels that nobody sees, with storages that nobody has named
    bool surely_outermost = true; ///< within no other, be that watched or not
  };
  /// Before an outermost operator. With the lock held. Does not throw: where a fetch fails its operand is used on
  /// the host.
  /// \param streams by device: the calling thread's current streams, of the devices that the operands are on
  void begin(Frame& frame, const Operator& op, std::span<const Operand> operands,
             const std::vector<Stream>& streams) noexcept;
  /// Before an operator within another one: what the outer one did not hold is used where it is.
  void begin_nested(Frame& frame, std::span<const Operand> operands, const std::vector<Stream>& streams) noexcept;
  /// An output of the operator or of one within it; held until the end.
  void born(Frame& frame, Record* record, const std::vector<Stream>& streams) noexcept;
  /// With the lock held.
  void end(Frame& frame) noexcept;

  /// A storage's bytes are gone: its block is being freed (the caller does that, and says so then), or its host copy.
  void died(Record* record) noexcept;
  /// A storage with a block of its own may have died, and others that have no record live on with its bytes.
  void outlived(Block* block) noexcept;
  /// The block of a storage that died on its device has been freed. Takes no lock.
  void freed() noexcept;

  /// An address is about to leave PyTorch. The bytes are complete when this returns, stay until the next operator,
  /// and count as written.
  void settle(Record* record);
  /// The storage is on the device and stays there until it is released as often as it was held. What a graph has
  /// captured stays where the graph has it. With the lock held.
  /// \return false: an operator uses the storage on the host, and nothing has changed; try again when it has ended
  /// \throws OutOfMemory: there is no room, and nothing has changed
  bool hold(Record* record, Stream stream);
  void release(Record* record) noexcept;

  // captures.cpp: a graph keeps the addresses of what was captured into it, and nobody sees it run.

  /// \return what to call the others with. Until `end_capture`, what operators capture is held for this graph.
  std::uint64_t begin_capture();
  void end_capture(std::uint64_t capture) noexcept;
  /// The graph is launched on the stream: what was captured is in use there.
  void replayed(std::uint64_t capture, Stream stream);
  /// The graph is gone.
  void release_capture(std::uint64_t capture) noexcept;
  /// One relaxed load: whether there is a capture between its begin and its end.
  bool has_open_captures() const noexcept {
    return open_captures_.load(std::memory_order_relaxed) != 0;
  }
  /// An operator is about to use the storage where it is, on that stream, and may write to it; nobody says when it
  /// ends. With the lock held.
  void used_unseen(Record& record, Stream stream) noexcept;

  /// In place of `begin`, for an operator that is being captured: operands stay where they are from now on. With the
  /// lock held.
  void captured(std::span<const Operand> operands) noexcept;

  /// For tests of what runs on top: while on, each storage that may leave its device does when an operator has ended,
  /// whatever the budget, and is fetched or used in place by the next one. Needs a budget, which operators are watched
  /// for.
  void evict_after_operators(bool on);

  void mark_step();
  void start_recording(const std::string& path);
  void stop_recording();

  ResidencyStatistics statistics();
  void reset_statistics();

  /// What contradicts the invariants, or nullopt. For tests.
  std::optional<std::string> check();

  bool make_room(std::size_t bytes, Location home, Stream stream) override;
  bool may_exceed(std::size_t bytes, Location home) override;
  std::string explain(std::size_t bytes, Location home) noexcept override;

 private:
  friend class Lock;

  /// Of the operator that runs: allocated bytes, those that the engine moves left aside.
  struct Workspace {
    std::int64_t peak = 0;
    std::int64_t ours = 0; ///< fetched less given up since it began
  };

  /// Allocated bytes as they were when the allocator was last asked.
  struct Allocated {
    std::size_t bytes = 0;
    std::uint64_t changes = ~std::uint64_t{0}; ///< the allocator's count, by then
  };

  /// Whether a device may sleep, and what it was like when it fell asleep.
  struct Quiet {
    std::uint64_t since = 0; ///< the operator that disturbed it last
    std::uint64_t next_look = 0;
    std::uint64_t misses = 0; ///< the policy's, by then
    std::uint64_t overlap = 0; ///< the latest operator that began while another one ran
    std::int64_t rooms = 0; ///< made, by the latest look
    std::uint64_t write_backs = 0;
    std::size_t peak = 0; ///< allocated bytes, at most, since then
    std::size_t level = 0; ///< allocated bytes that it has been quiet at, but for a little more
    std::size_t alarm = 0; ///< allocated bytes that wake it; 0: it has not fallen asleep
    std::size_t other = 0; ///< allocated bytes that no record has, since it was watched
    std::size_t unseen = 0; ///< the same of what was made while nobody watched
    unsigned rests = 0;
    unsigned seen = 0; ///< operators since it woke
  };

  struct Device {
    std::optional<std::size_t> budget;
    std::size_t cap = 0; ///< of it, what segments may have; staging has the rest
    bool hard = false;
    bool asleep = false; ///< nobody is watched
    bool settled = true; ///< no operator runs that began unseen; else nothing may be given up
    Quiet quiet;
    int running = 0; ///< operators with operands there
    std::unique_ptr<Policy> policy; ///< made with the first budget
    Stream fetches;
    Stream write_backs;
    std::unique_ptr<Staging> incoming; ///< none: it has never been needed
    std::unique_ptr<Staging> outgoing;
    std::deque<StorageId> pending; ///< fetches that the policy wants and that there was no room for yet
    std::size_t fetched_ahead = 0; ///< bytes whose fetch was started for this plan, and that no operator has used yet
    std::uint64_t fetch_round = 0; ///< plans that were forgotten: what was fetched for them may never be used
    std::multimap<std::uint64_t, StorageId> unforeseen; ///< they left, and the plan has not: by when to ask for them
    unsigned pause = 0; ///< operators until there is another look for room for them
    unsigned next_pause = 0;
    struct Retirement {
      StorageId storage;
      std::uint64_t number; ///< the record's, unless it was used and retired again since
    };
    std::deque<Retirement> retired; ///< as write-backs were started, some used again since
    std::uint64_t retirements = 0;
    Workspace workspace;
    Allocated allocated;
    Stream last_stream; ///< of the latest operator: what is free of all work is best filed there
    std::uint64_t write_backs_started = 0;
    std::uint64_t write_backs_read =
        0; ///< of these, those that have read the device copy, as far as anybody has looked
    bool exceeded = false; ///< by the operator that runs
    unsigned regions = 0; ///< that run
    bool excess = false; ///< a budget may have been exceeded by what nobody watched, and not kept again since
    std::uint64_t next_shrink = 0; ///< the operator after which to try to keep it again
    std::uint64_t shrink_pause = 0;
  };

  struct Capture {
    bool open = true;
    std::unordered_set<StorageId> held;
    std::vector<Stream> streams; ///< it was launched on
  };

  enum class Need { kNow, kAhead }; ///< an operator waits for it; or it would be good to have

  // With the mutex held.

  // budget.cpp
  /// What segments may have of a budget.
  std::size_t cap_within(int device, std::size_t budget, std::size_t staged) const;
  std::size_t slot_bytes(int device, std::size_t budget) const;
  /// Those that are missing, all or none.
  void make_streams(int device, bool stages);
  /// \return what slots of that many bytes take in all
  std::size_t stage(Device& device, std::size_t slot_bytes) noexcept;
  /// Brings everything of a device back to it, complete, and forgets host copies: operators are not watched from now
  /// on. Waits for operators that use storages on the host.
  /// \throws OutOfMemory, RuntimeFailure; then as much is back as fits, or as may change its address
  void bring_back(int device, Lock& lock);
  /// The same, where everything fits into the budget and is not in use on the host; false: it is not.
  bool is_brought_back(int device, Lock& lock);
  /// Gives up device copies until what is reserved is within the budget, as far as they can be.
  void shrink(int device);
  void note_awake();
  void keep_again(int device);
  void give_back_excess(const Frame& frame, int device);

  // explain.cpp
  /// Bytes of a device that a request finds in its way, by the reason why they stay.
  struct Staying {
    std::size_t operands = 0; ///< of the calling thread's operator, wherever they are
    std::size_t pinned = 0; ///< keep_resident, exports, captures
    std::size_t others = 0; ///< of other threads' operators; several labels
    std::size_t unknown = 0; ///< too small to be moved, or made by operators that run
  };
  Staying staying(int device, std::span<Record* const> held) const;
  /// The smallest budget whose segments hold that many bytes.
  std::size_t budget_for(int device, std::size_t bytes) const;

  // sleep.cpp
  void note_level(Device& device, std::size_t bytes);
  void restart_quiet(Device& device);
  void rest_if_quiet(int device);
  bool fall_asleep(int device);
  void settle_down(int device, bool surely_outermost);
  bool may_run_unseen(const Device& device) const;
  /// No operator runs that began unseen: storages may leave from now on.
  void note_settled(int device);
  std::size_t allocated_bytes(int device) const;

  // relocation.cpp
  /// The operator that begins holds the record, and has not read its address yet.
  bool is_unread(const Record& record) const;
  bool address_may_change(const Record& record, Mover mover) const {
    return record.address_may_change(mover, is_unread(record) ? 1 : 0, operators_);
  }
  /// Whether the storage's address may change now; then the storage is kept alive until the lock is released.
  bool claim_address(Record& record, Mover mover);
  /// It was found out that the storage cannot be moved. For a while: its other labels may go.
  void fix(Record& record) {
    record.fixed_until = operators_ + kFixedFor;
    found_fixed_ = true;
  }
  bool is_fixed(const Record& record) const {
    return operators_ < record.fixed_until;
  }
  /// Bytes that others shared leave as they are now, not as they were copied before.
  void reclaim(Record& record);
  bool start_write_back(Record& record);
  // `taker`: the stream that will use the memory next; the host's: it is not known
  bool give_up_device_copy(Record& record, Stream taker);
  bool evict(Record& record, Stream taker);
  bool start_fetch(Record& record, Need need, Stream stream);
  void mark_use(Record& record, bool writes) noexcept;
  /// Where streams could not be made to wait, the host does.
  void wait_here(Record& record) noexcept;
  /// Fetches the storage if its bytes are on the host. \return false: they stay there
  bool bring_to_device(Record& record, Stream stream);
  void use_on_device(Record& record, Stream stream, bool writes);
  void use_in_place(Record& record, Stream stream, bool writes);
  void drop_host_copy(Record& record) noexcept;
  void abandon_fetch(Record& record) noexcept;
  Block* host_block(std::size_t bytes, Stream stream);
  /// What comes next on `later` waits for what is queued on the others.
  void order(const std::vector<Stream>& earlier, Stream later);
  void note_move(TransferKind kind, const Record& record) noexcept;
  static double now_us();

  // room.cpp
  Block* room_for(std::size_t bytes, int device, Need need, Stream stream);
  /// Leaves `bytes` in one piece for `taker`: gives up what costs the least, and moves aside what is in the way.
  bool give_up_run(std::size_t bytes, int device, Need need, Stream taker);
  bool try_repeatedly_to_give_up(std::size_t bytes, int device, Need need, Stream taker);
  /// Whether there were storages that were not tried because they could not be moved lately.
  bool forget_fixed(int device);
  bool try_to_give_up(std::size_t bytes, int device, Need need, Stream taker);
  bool give_up_lowest(std::size_t bytes, int device, Stream taker);
  /// Everything that may leave. \return whether anything has
  bool give_up_all(int device, Stream taker);
  bool give_up_alike(std::size_t bytes, int device, Stream taker);
  void give_up_read(int device);
  bool is_read(Record& record);
  double cost_of(const Record& record, Need need);
  /// Not used for as long as a step of the plan that is followed, which does not know it.
  bool is_idle(const Record& record) const;
  /// 1: used next at once; towards 0: ever later.
  double soonness(const Record& record);
  double price_of(const std::vector<Record*>& victims, Need need);
  /// What to give up for that many bytes anywhere; empty: there are not as many.
  std::vector<Record*> cheapest_bytes(std::size_t bytes, int device, Need need);
  /// Neighbours, as the allocator finds them.
  std::optional<std::vector<Record*>> cheapest_run(std::size_t bytes, int device, Need need);
  /// Whether another thread is about to free what a storage has on the device.
  bool something_goes(int device) const;
  bool evict_all(const std::vector<Record*>& victims, Stream taker);
  /// Bytes of a device that nobody has, in pieces.
  std::size_t unused(int device) const;
  /// What retires, if it still does.
  Record* retiring(const Device::Retirement& retirement) const;
  bool move_aside(std::size_t bytes, int device, Stream taker);
  void move(const CachingManagedAllocator::Move& move, Stream taker);

  // prepare_room.cpp
  /// Sees to it that the operator will find places for these, each in one piece.
  /// \param left operands that have made way and are to be provided once more
  void prepare_room(const Frame& frame, std::span<const std::size_t> pieces, Stream stream, std::vector<Record*>& left);
  /// An operand of that many bytes or more leaves, and comes back elsewhere if there is a place.
  bool make_one_leave(const Frame& frame, std::size_t bytes, Stream stream, std::vector<Record*>& left);

  // operators.cpp
  void note_begin(Frame& frame, const Operator& op);
  void follow(const Decision& decision, int device);
  void forget_fetches(Device& device) noexcept;
  /// It is used, or given up.
  void no_longer_ahead(const Record& record) noexcept;
  void start_pending_fetches(int device, bool changed);
  /// It left though the plan counts on it.
  void fetch_again(const Record& record);
  /// What was left for later and is needed soon takes its turn among the fetches ahead.
  void queue_unforeseen_fetches(int device);
  /// The most bytes allocated since the last call. Most operators allocate nothing: then no lock is taken.
  std::int64_t take_allocated_peak(int device);
  void begin_workspace(int device);
  /// The engine has allocated that many bytes; below 0: freed.
  void note_workspace(int device, std::int64_t bytes);
  std::size_t end_workspace(int device);
  void announce(Record& record);
  /// A policy hears of what is on its device.
  std::span<const Access> accesses_on(int device, const Frame& frame);
  void take(Frame& frame, Record* record);
  /// A call failed while an operand was made ready: its pointer shows a copy that is complete once this returns.
  void without_the_runtime(Record& record, Stream stream, bool writes) noexcept;
  /// The same of an operand that an operator uses though it could not be noted that it does.
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
  void give_event(int device, Event& event) noexcept;
  void give_block_ready(Record& record) noexcept;
  /// When the latest write-back has read the device copy; the host's may be complete later only.
  Event& was_read(Record& record) {
    return record.block_ready ? record.block_ready : record.host_ready;
  }
  void bury(Record* record) noexcept;
  void free_if_dead(Record* record) noexcept;
  Device& of(int device) {
    return devices_[static_cast<std::size_t>(device)];
  }
  Record* find(StorageId id) const;

  ManagedRuntime& runtime_;
  CachingManagedAllocator& memory_;
  StorageDoor& door_;
  mutable std::mutex mutex_;
  std::condition_variable freed_; ///< a block was, of a storage that had died; told without the mutex
  std::atomic<int> leaving_{0}; ///< such blocks that are not freed yet
  std::atomic<bool> awake_{false};
  std::atomic<bool> unsettled_{false};
  std::atomic<int> sleepers_{0};
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
  FlatMap<Record*> records_; ///< by their storages' numbers
  StorageId next_id_ = 1;
  std::map<std::uint64_t, Capture> captures_;
  std::uint64_t next_capture_ = 1;
  std::uint64_t operators_ = 0;
  std::vector<Access> accesses_; ///< of the operator that begins
  std::vector<Access> told_; ///< of these, those on one device
  std::int64_t hits_at_reset_ = 0;
  std::int64_t misses_at_reset_ = 0;
  std::int64_t failures_ = 0;
  bool evicts_after_operators_ = false;
  bool found_fixed_ = false; ///< a storage that cannot be moved, since somebody has looked
  const Frame* beginning_ = nullptr; ///< its operands' places are being found
  bool no_room_ahead_ = false; ///< found out for an operand of the operator that begins
  bool host_refused_ = false; ///< the latest copy to the host found no room there
  std::vector<void*> kept_; ///< storages to let go of once the mutex is free
};

} // namespace torch_uvm
