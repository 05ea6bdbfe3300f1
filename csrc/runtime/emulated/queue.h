// Streams, events, and the schedule of queued operations.
//
// An operation has two halves. *Accounting* updates the page table and the clocks; *performing* copies the bytes.
//
// - Default schedule: an operation is accounted when it is queued, as if work ran in that order. So figures are
//   repeatable. Only copies stay in a stream's queue, with the marks and waits behind them. Each device has a worker
//   thread, started when first needed. It takes ready operations in the order queued and copies without holding the
//   mutex.
// - Seeded schedule: both halves are done together, by a thread that waits for the operation, or at a random later
//   call. Half of the operations are held: only a wait, or repeated queries, get them done. There are no worker
//   threads, so a single-threaded program repeats exactly with the same seed.
//
// Waiting for an operation completes everything before it in its stream and, through waits for marks, in other streams.
// A mark is recorded before it can be waited for, so there are no cycles.
//
// The queue uses the runtime's mutex. Every function is called with it held; those that take the lock may release it
// while they wait.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "runtime/emulated/model.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm::emulated {

struct StreamState;

/// A position in a stream, created by record_event.
struct Mark {
  std::shared_ptr<StreamState> stream;
  std::uint64_t position = 0; ///< of the record in its stream
  bool reached = false;
  double time_us = 0; ///< valid once accounted
};

struct Operation {
  enum class Kind { kCopy, kZero, kPrefetch, kDiscard, kRecord, kWait } kind = Kind::kCopy;
  void* ptr = nullptr; ///< the range; for a copy, the destination
  const void* source = nullptr; ///< for a copy
  std::size_t bytes = 0;
  Location to = Location::host(); ///< for a prefetch
  std::shared_ptr<Mark> mark = nullptr; ///< for a record or a wait
  double queued_us = 0; ///< the host's clock at queueing
  std::uint64_t sequence = 0; ///< order of queueing over all streams
  bool held = false;

  /// Whether it writes bytes, which a worker does without the mutex.
  bool writes() const {
    return kind == Kind::kCopy || kind == Kind::kZero;
  }
  void write() const noexcept;

  /// Whether it reads or writes bytes of the range.
  bool uses(const void* range, std::size_t range_bytes) const;
};

struct StreamState {
  int device = 0;
  std::deque<Operation> operations;
  std::uint64_t queued = 0; ///< operations ever added to `operations`
  std::uint64_t done = 0;
  bool running = false; ///< a worker is performing the first operation
  bool destroyed = false;
  double time_us = 0; ///< the stream's clock
};

struct EventState {
  int device = 0;
  bool timing = false;
  std::shared_ptr<Mark> mark; ///< null: never recorded
};

class EmulatedQueue {
 public:
  using Lock = std::unique_lock<std::mutex>;
  using Account = std::function<void(StreamState&, const Operation&)>;

  EmulatedQueue(int devices, std::optional<std::uint64_t> seed, std::mutex& mutex, Account account);
  ~EmulatedQueue() {
    stop();
  }
  /// Ends the workers and drops pending operations. Called without the mutex.
  void stop();

  Stream create_stream(int device);
  void destroy_stream(Stream stream) noexcept;
  /// \throws InvalidArgument for a stream that does not exist, such as Stream::host()
  const std::shared_ptr<StreamState>& stream(Stream stream) const;
  const std::vector<std::shared_ptr<StreamState>>& streams(int device) const {
    return devices_[static_cast<std::size_t>(device)].streams;
  }

  Event create_event(int device, bool timing);
  void destroy_event(Event event) noexcept;
  /// \throws InvalidArgument
  EventState& event(Event event);

  void enqueue(StreamState& stream, Operation operation);
  void record(EventState& event, const std::shared_ptr<StreamState>& stream, double queued_us);
  void wait_for(StreamState& stream, const EventState& event, double queued_us);

  static bool idle(const StreamState& stream) {
    return stream.operations.empty();
  }
  void drain(Lock& lock, const std::shared_ptr<StreamState>& stream);
  void drain_device(Lock& lock, int device);
  void reach(Lock& lock, const std::shared_ptr<Mark>& mark);
  /// Completes all operations that access the range.
  void drain_range(Lock& lock, const void* ptr, std::size_t bytes);

  /// Seeded schedule: performs a random number of ready operations. Default schedule: does nothing.
  void tick();
  /// Called when the stream is queried. Repeated queries eventually release held operations, so polling terminates.
  void tick_for(StreamState& stream);
  std::size_t pending() const;

  /// For tests, default schedule only: a held device performs no operation until it is released.
  void hold(int device, bool held);
  /// Blocks until a thread waits for queued work.
  void await_waiter(Lock& lock);
  /// The number of created streams and events that are not destroyed.
  std::size_t handles() const {
    return created_streams_.size() + events_.size();
  }

  void before_fork(Lock& lock); ///< completes what the workers can perform
  void after_fork_in_child();

 private:
  struct Device {
    std::vector<std::shared_ptr<StreamState>> streams; ///< the default stream is the first
    /// On the heap, so that a forked child, which has no such thread, can leak it.
    std::unique_ptr<std::thread> worker;
    bool held = false; ///< the worker starts no operation
  };

  /// Default schedule: whether the operation is done at once and does not enter the stream's queue.
  static bool over_at_once(const StreamState& stream, const Operation& operation);
  /// Starts the device's worker, if it is not running. \throws RuntimeFailure if no thread can be created
  void start_worker(int device);
  void work(int device);
  StreamState* next_ready(int device);
  void finish_first(StreamState& stream);
  void perform_first(StreamState& stream); // seeded schedule: accounts and performs under the mutex
  void force(StreamState& stream, std::uint64_t position);
  void complete(Lock& lock, const std::shared_ptr<StreamState>& stream, std::uint64_t position);
  bool chance(unsigned one_in);

  std::mutex& mutex_;
  const Account account_;
  std::optional<std::mt19937_64> generator_;
  std::vector<Device> devices_;
  std::unordered_map<void*, std::shared_ptr<StreamState>> created_streams_;
  std::unordered_map<void*, EventState> events_;
  std::uintptr_t next_handle_ = 0; ///< handles are never reused, so that stale ones are detected
  std::uint64_t next_sequence_ = 0;
  bool stopping_ = false;
  int waiters_ = 0; ///< threads in `complete`
  /// On the heap and leaked in a forked child too: it must not use or destroy a condition variable with waiters.
  std::unique_ptr<std::condition_variable> work_;
  std::unique_ptr<std::condition_variable> progress_;
};

} // namespace torch_uvm::emulated
