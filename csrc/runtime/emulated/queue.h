// Streams, events, and who does queued work when.
//
// An operation has two halves. *Accounting* brings pages and clocks up to date; *performing* copies bytes.
//
// - Default schedule: an operation is accounted when it is queued, which is what doing everything in the
//   order queued amounts to, and makes figures repeatable. Only copies, and the marks and waits behind
//   them, stay in a stream's queue; a worker thread per device, started when first needed, takes those
//   that are ready, in the order queued, and copies without holding the mutex.
// - Seeded schedule: both halves are done at once, by whichever thread waits for the operation, or by the
//   generator's choice at some later call. Half of the operations are held: only a wait gets them done,
//   or being asked about often. There are no threads, so a seed repeats.
//
// Waiting for an operation gets all done that is before it in its stream and, through waits for marks, in
// others. A mark is recorded before anyone can wait for it, so this always ends.
//
// The queue uses the runtime's mutex; every function is called with it held, and those that take the lock
// may let go of it while they wait.
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

/// A place in a stream, made by a record.
struct Mark {
  std::shared_ptr<StreamState> stream;
  std::uint64_t position = 0; ///< of the record in its stream
  bool reached = false;
  double time_us = 0; ///< known once accounted
};

struct Operation {
  enum class Kind { kCopy, kZero, kPrefetch, kDiscard, kRecord, kWait } kind = Kind::kCopy;
  void* ptr = nullptr; ///< the range; of a copy, where to
  const void* source = nullptr; ///< of a copy
  std::size_t bytes = 0;
  Location to; ///< of a prefetch
  std::shared_ptr<Mark> mark; ///< of a record or wait
  double queued_us = 0; ///< the host's clock then
  std::uint64_t sequence = 0; ///< over all streams
  bool held = false;

  /// Whether there are bytes to write, which a worker does without the mutex.
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
  std::uint64_t queued = 0; ///< operations that were ever put into `operations`
  std::uint64_t done = 0;
  bool running = false; ///< a worker is at the first one
  bool destroyed = false;
  double time_us = 0; ///< its clock
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
  /// Without the mutex held: ends the workers; what they have not begun is dropped.
  void stop();

  Stream create_stream(int device);
  void destroy_stream(Stream stream) noexcept;
  /// \throws InvalidArgument for a stream that does not exist, the host's included
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
  /// Gets everything done that uses bytes of the range.
  void drain_range(Lock& lock, const void* ptr, std::size_t bytes);

  /// Under a seeded schedule some of what is ready gets done, by chance; else nothing happens.
  void tick();
  /// Somebody asked whether the stream is done: then it will not be held for ever.
  void tick_for(StreamState& stream);
  std::size_t pending() const;

  // For tests, under the default schedule: a device that is busy until it is released.
  void hold(int device, bool held);
  /// Waits until a thread waits for queued work.
  void await_waiter(Lock& lock);
  /// Streams and events that were created and not destroyed.
  std::size_t handles() const {
    return created_streams_.size() + events_.size();
  }

  void before_fork(Lock& lock); ///< what workers have begun, and could do, is done
  void after_fork_in_child();

 private:
  struct Device {
    std::vector<std::shared_ptr<StreamState>> streams; ///< first the default one
    // On the heap, and abandoned in a forked child: the threads that it belongs to are not there.
    std::unique_ptr<std::thread> worker;
    bool held = false; ///< the worker takes no operation
  };

  /// Under the default schedule: whether nothing of it has to wait in the stream's queue.
  static bool over_at_once(const StreamState& stream, const Operation& operation);
  /// Unless it runs. \throws RuntimeFailure where the system has no thread for it
  void start_worker(int device);
  void work(int device);
  StreamState* next_ready(int device);
  void finish_first(StreamState& stream);
  void perform_first(StreamState& stream); // seeded: accounts and performs, under the mutex
  void force(StreamState& stream, std::uint64_t position);
  void complete(Lock& lock, const std::shared_ptr<StreamState>& stream, std::uint64_t position);
  bool chance(unsigned one_in);

  std::mutex& mutex_;
  const Account account_;
  std::optional<std::mt19937_64> generator_;
  std::vector<Device> devices_;
  std::unordered_map<void*, std::shared_ptr<StreamState>> created_streams_;
  std::unordered_map<void*, EventState> events_;
  std::uintptr_t next_handle_ = 0; ///< handles are numbers, never reused: a stale one is noticed
  std::uint64_t next_sequence_ = 0;
  bool stopping_ = false;
  int waiters_ = 0; ///< threads in `complete`
  // Abandoned in a forked child, like the workers: one that was waited on cannot be used or destroyed there.
  std::unique_ptr<std::condition_variable> work_;
  std::unique_ptr<std::condition_variable> progress_;
};

} // namespace torch_uvm::emulated
