// The schedules: which thread performs queued work, and when. By default a worker does; under a seed, a waiting thread
// or one chosen at random.
#include "runtime/emulated/queue.h"

namespace torch_uvm::emulated {
namespace {

// Seeded schedule: probabilities, as one in this many.
constexpr unsigned kStopTicking = 2;
constexpr unsigned kReleasedWhenAsked = 8;

bool ready(const StreamState& stream) {
  const Operation& first = stream.operations.front();
  return first.kind != Operation::Kind::kWait || first.mark->reached;
}

} // namespace

// --- the default schedule: workers ------------------------------------------------------------------------

StreamState* EmulatedQueue::next_ready(int device) {
  StreamState* next = nullptr;
  const Device& on = devices_[static_cast<std::size_t>(device)];
  if (on.held) {
    return nullptr;
  }
  for (const auto& stream : on.streams) {
    if (!idle(*stream) && ready(*stream) &&
        (next == nullptr || stream->operations.front().sequence < next->operations.front().sequence)) {
      next = stream.get();
    }
  }
  return next;
}

void EmulatedQueue::work(int device) {
  Lock lock(mutex_);
  while (true) {
    StreamState* stream = nullptr;
    work_->wait(lock, [&] { return stopping_ || (stream = next_ready(device)) != nullptr; });
    if (stopping_) {
      return;
    }
    const Operation::Kind kind = stream->operations.front().kind;
    if (stream->operations.front().writes()) {
      // Only this thread accesses the first operation until it is done. A deque does not move its elements when others
      // are appended.
      const Operation& first = stream->operations.front();
      stream->running = true;
      lock.unlock();
      first.write();
      lock.lock();
      stream->running = false;
    }
    finish_first(*stream); // it may have been the stream's last operation
    progress_->notify_all();
    if (kind == Operation::Kind::kRecord) {
      work_->notify_all(); // a worker of another device may wait for it
    }
  }
}

// --- the seeded schedule ----------------------------------------------------------------------------------

bool EmulatedQueue::chance(unsigned one_in) {
  return (*generator_)() % one_in == 0;
}

void EmulatedQueue::perform_first(StreamState& stream) {
  const Operation& operation = stream.operations.front();
  account_(stream, operation);
  operation.write();
  finish_first(stream);
}

void EmulatedQueue::tick() {
  if (!generator_) {
    return;
  }
  std::vector<StreamState*> choices;
  while (!chance(kStopTicking)) {
    choices.clear();
    for (const Device& device : devices_) {
      for (const auto& stream : device.streams) {
        if (!idle(*stream) && !stream->operations.front().held && ready(*stream)) {
          choices.push_back(stream.get());
        }
      }
    }
    if (choices.empty()) {
      return;
    }
    perform_first(*choices[(*generator_)() % choices.size()]);
  }
}

void EmulatedQueue::tick_for(StreamState& stream) {
  if (!generator_ || idle(stream)) {
    return;
  }
  // Polling must terminate. Another stream may delay the polled one.
  StreamState* at = &stream;
  while (!idle(*at) && !ready(*at)) {
    at->operations.front().held = false;
    at = at->operations.front().mark->stream.get();
  }
  if (!idle(*at) && chance(kReleasedWhenAsked)) {
    at->operations.front().held = false;
  }
  tick();
}

// A wait names a mark that was recorded before it, so the recursion terminates.
void EmulatedQueue::force(StreamState& stream, std::uint64_t position) {
  while (stream.done < position) {
    if (!ready(stream)) {
      const std::shared_ptr<Mark> mark = stream.operations.front().mark;
      force(*mark->stream, mark->position);
    }
    perform_first(stream);
  }
}

} // namespace torch_uvm::emulated
