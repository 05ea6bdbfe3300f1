#include "runtime/emulated/queue.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>
#include <system_error>

#include "runtime/bytes.h"

namespace torch_uvm::emulated {
namespace {

// Waking a worker takes longer than copying this many bytes.
constexpr std::size_t kCopyAtOnceBytes = 64 * KiB;

// Seeded schedule: an operation is held with a probability of one in this many.
constexpr unsigned kHeld = 2;

bool overlap(const void* left, std::size_t left_bytes, const void* right, std::size_t right_bytes) {
  const auto a = reinterpret_cast<std::uintptr_t>(left);
  const auto b = reinterpret_cast<std::uintptr_t>(right);
  return a < b + right_bytes && b < a + left_bytes;
}

} // namespace

bool Operation::uses(const void* range, std::size_t range_bytes) const {
  return (ptr != nullptr && overlap(ptr, bytes, range, range_bytes)) ||
         (source != nullptr && overlap(source, bytes, range, range_bytes));
}

void Operation::write() const noexcept {
  if (kind == Kind::kCopy) {
    std::memmove(ptr, source, bytes);
  } else if (kind == Kind::kZero) {
    std::memset(ptr, 0, bytes);
  }
}

EmulatedQueue::EmulatedQueue(int devices, std::optional<std::uint64_t> seed, std::mutex& mutex, Account account)
    : mutex_(mutex),
      account_(std::move(account)),
      devices_(static_cast<std::size_t>(devices)),
      work_(std::make_unique<std::condition_variable>()),
      progress_(std::make_unique<std::condition_variable>()) {
  if (seed) {
    generator_.emplace(*seed);
  }
  for (std::size_t device = 0; device < devices_.size(); ++device) {
    auto stream = std::make_shared<StreamState>();
    stream->device = static_cast<int>(device);
    devices_[device].streams.push_back(std::move(stream));
  }
}

void EmulatedQueue::stop() {
  {
    Lock lock(mutex_);
    stopping_ = true;
    work_->notify_all();
  }
  for (Device& device : devices_) {
    if (device.worker) {
      device.worker->join();
      device.worker.reset();
    }
    // Marks own streams, and queued waits own marks. Without this they would keep each other alive.
    for (const auto& stream : device.streams) {
      stream->operations.clear();
    }
  }
}

// --- streams and events -----------------------------------------------------------------------------------

Stream EmulatedQueue::create_stream(int device) {
  auto stream = std::make_shared<StreamState>();
  stream->device = device;
  void* handle = reinterpret_cast<void*>(++next_handle_ * sizeof(void*));
  created_streams_.emplace(handle, stream);
  devices_[static_cast<std::size_t>(device)].streams.push_back(std::move(stream));
  return Stream{device, handle};
}

void EmulatedQueue::destroy_stream(Stream stream) noexcept {
  const auto found = created_streams_.find(stream.handle);
  if (found == created_streams_.end() || found->second->device != stream.device) {
    return;
  }
  // Queued work is still done; then the device removes the stream.
  const std::shared_ptr<StreamState> state = found->second;
  created_streams_.erase(found);
  state->destroyed = true;
  if (idle(*state)) {
    std::erase(devices_[static_cast<std::size_t>(state->device)].streams, state);
  }
}

const std::shared_ptr<StreamState>& EmulatedQueue::stream(Stream stream) const {
  if (stream.device >= 0 && static_cast<std::size_t>(stream.device) < devices_.size()) {
    if (stream.handle == nullptr) {
      return devices_[static_cast<std::size_t>(stream.device)].streams.front();
    }
    const auto found = created_streams_.find(stream.handle);
    if (found != created_streams_.end() && found->second->device == stream.device) {
      return found->second;
    }
  }
  std::ostringstream message;
  if (stream.is_host()) {
    message << "the host has no stream; a stream of one of " << devices_.size() << " devices is needed";
  } else {
    message << "stream " << stream.handle << " of device " << stream.device << " does not exist; there are "
            << devices_.size() << " devices, with a default stream each, and " << created_streams_.size()
            << " other streams";
  }
  throw InvalidArgument(message.str());
}

Event EmulatedQueue::create_event(int device, bool timing) {
  void* handle = reinterpret_cast<void*>(++next_handle_ * sizeof(void*));
  events_.emplace(handle, EventState{device, timing, nullptr});
  return Event{handle};
}

void EmulatedQueue::destroy_event(Event event) noexcept {
  events_.erase(event.handle);
}

EventState& EmulatedQueue::event(Event event) {
  const auto found = events_.find(event.handle);
  if (found == events_.end()) {
    std::ostringstream message;
    message << "event " << event.handle << " does not exist; there are " << events_.size() << " events";
    throw InvalidArgument(message.str());
  }
  return found->second;
}

// --- queueing ---------------------------------------------------------------------------------------------

void EmulatedQueue::enqueue(StreamState& stream, Operation operation) {
  const bool is_record = operation.kind == Operation::Kind::kRecord;
  const bool was_idle = idle(stream);
  operation.sequence = ++next_sequence_;
  if (generator_) {
    operation.held = chance(kHeld);
  } else if (over_at_once(stream, operation)) {
    account_(stream, operation);
    operation.write();
    if (is_record) {
      operation.mark->reached = true;
    }
    return;
  } else {
    start_worker(stream.device); // first, because it may fail
    account_(stream, operation);
  }
  if (is_record) {
    operation.mark->position = stream.queued + 1;
  }
  stream.operations.push_back(std::move(operation));
  ++stream.queued;
  tick();
  if (was_idle) {
    work_->notify_all(); // otherwise the worker proceeds without a wake-up
  }
}

bool EmulatedQueue::over_at_once(const StreamState& stream, const Operation& operation) {
  switch (operation.kind) {
    case Operation::Kind::kPrefetch:
    case Operation::Kind::kDiscard:
      return true; // no bytes to copy
    case Operation::Kind::kCopy:
    case Operation::Kind::kZero:
      return idle(stream) && operation.bytes <= kCopyAtOnceBytes;
    case Operation::Kind::kRecord:
      return idle(stream);
    case Operation::Kind::kWait:
      break;
  }
  return operation.mark->reached;
}

void EmulatedQueue::start_worker(int device) {
  std::unique_ptr<std::thread>& worker = devices_[static_cast<std::size_t>(device)].worker;
  if (worker) {
    return;
  }
  try {
    worker = std::make_unique<std::thread>([this, device] { work(device); });
  } catch (const std::system_error& error) {
    throw RuntimeFailure("emulated device " + std::to_string(device) +
                         " needs a worker thread, and gets none: " + error.what());
  }
}

void EmulatedQueue::record(EventState& event, const std::shared_ptr<StreamState>& stream, double queued_us) {
  const auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  enqueue(*stream, {.kind = Operation::Kind::kRecord, .mark = mark, .queued_us = queued_us});
  event.mark = mark; // set last: a record that could not be queued is never waited for
}

void EmulatedQueue::wait_for(StreamState& stream, const EventState& event, double queued_us) {
  if (event.mark) { // else never recorded: nothing to wait for
    enqueue(stream, {.kind = Operation::Kind::kWait, .mark = event.mark, .queued_us = queued_us});
  }
}

void EmulatedQueue::finish_first(StreamState& stream) {
  if (stream.operations.front().kind == Operation::Kind::kRecord) {
    stream.operations.front().mark->reached = true;
  }
  stream.operations.pop_front();
  ++stream.done;
  if (stream.destroyed && idle(stream)) {
    auto& streams = devices_[static_cast<std::size_t>(stream.device)].streams;
    std::erase_if(streams, [&](const auto& each) { return each.get() == &stream; });
  }
}

// --- waiting ----------------------------------------------------------------------------------------------

void EmulatedQueue::complete(Lock& lock, const std::shared_ptr<StreamState>& stream, std::uint64_t position) {
  const std::shared_ptr<StreamState> kept = stream; // it may be destroyed during the wait
  if (generator_) {
    force(*kept, position);
    return;
  }
  ++waiters_;
  progress_->notify_all(); // for `await_waiter`
  progress_->wait(lock, [&] { return kept->done >= position; });
  --waiters_;
}

void EmulatedQueue::drain(Lock& lock, const std::shared_ptr<StreamState>& stream) {
  if (!idle(*stream)) {
    complete(lock, stream, stream->queued);
  }
}

void EmulatedQueue::drain_device(Lock& lock, int device) {
  // streams may be created and destroyed during the wait
  const auto streams = devices_[static_cast<std::size_t>(device)].streams;
  for (const auto& stream : streams) {
    drain(lock, stream);
  }
}

void EmulatedQueue::reach(Lock& lock, const std::shared_ptr<Mark>& mark) {
  if (mark && !mark->reached) {
    complete(lock, mark->stream, mark->position);
  }
}

void EmulatedQueue::drain_range(Lock& lock, const void* ptr, std::size_t bytes) {
  std::vector<std::pair<std::shared_ptr<StreamState>, std::uint64_t>> uses;
  for (const Device& device : devices_) {
    for (const auto& stream : device.streams) {
      std::uint64_t position = stream->done;
      std::uint64_t last = 0;
      for (const Operation& operation : stream->operations) {
        ++position;
        if (operation.uses(ptr, bytes)) {
          last = position;
        }
      }
      if (last != 0) {
        uses.emplace_back(stream, last);
      }
    }
  }
  for (const auto& [stream, position] : uses) {
    complete(lock, stream, position);
  }
}

std::size_t EmulatedQueue::pending() const {
  std::size_t pending = 0;
  for (const Device& device : devices_) {
    for (const auto& stream : device.streams) {
      pending += stream->operations.size();
    }
  }
  return pending;
}

void EmulatedQueue::hold(int device, bool held) {
  devices_[static_cast<std::size_t>(device)].held = held;
  work_->notify_all();
}

void EmulatedQueue::await_waiter(Lock& lock) {
  progress_->wait(lock, [&] { return waiters_ != 0; });
}

// --- fork -------------------------------------------------------------------------------------------------

void EmulatedQueue::before_fork(Lock& lock) {
  if (generator_) {
    return; // operations are atomic under the mutex
  }
  for (std::size_t device = 0; device < devices_.size(); ++device) {
    drain_device(lock, static_cast<int>(device));
  }
  // Another thread may have queued more during the wait. The fork must not interrupt a copy.
  progress_->wait(lock, [&] {
    return std::none_of(devices_.begin(), devices_.end(), [](const Device& device) {
      return std::any_of(device.streams.begin(), device.streams.end(), [](const auto& each) { return each->running; });
    });
  });
}

void EmulatedQueue::after_fork_in_child() {
  waiters_ = 0;
  for (Device& device : devices_) {
    device.held = false;
    static_cast<void>(device.worker.release()); // leaked on purpose: its thread does not exist in the child
    const auto streams = device.streams;
    for (const auto& stream : streams) {
      while (!idle(*stream)) {
        finish_first(*stream); // dropped; a wait for it must not block for ever
      }
    }
  }
  // Leaked on purpose: they count waiters that do not exist in the child.
  static_cast<void>(work_.release());
  static_cast<void>(progress_.release());
  work_ = std::make_unique<std::condition_variable>();
  progress_ = std::make_unique<std::condition_variable>();
}

} // namespace torch_uvm::emulated
