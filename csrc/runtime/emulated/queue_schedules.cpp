// Which thread does queued work, and when: a worker by default; under a seed, a thread that waits, or one chosen at
// random.
#include "runtime/emulated/queue.h"

namespace torch_uvm::emulated {
namespace {

// Seeded schedule: how likely things are, as one in so many.
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
      // Only this thread touches the first operation until it is done. A deque keeps
      // its elements in place when others are added at its end.
      const Operation& first = stream->operations.front();
      stream->running = true;
      lock.unlock();
      first.write();
      lock.lock();
      stream->running = false;
    }
    finish_first(*stream); // may be the end of the stream
    progress_->notify_all();
    if (kind == Operation::Kind::kRecord) {
      work_->notify_all(); // another device may wait for it
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
  // A program that polls must get on at last. What it polls may be held up by another stream.
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

// A wait names a mark that was recorded before it, so the recursion ends.
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
