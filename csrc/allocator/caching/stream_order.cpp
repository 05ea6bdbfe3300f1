#include "allocator/caching/stream_order.h"

#include <algorithm>

namespace torch_uvm {

bool StreamOrder::holds(Stream earlier, Stream later, std::uint64_t tick) const {
  const auto found = known_.find(earlier);
  if (found == known_.end()) {
    return false;
  }
  const Known& known = found->second;
  if (tick <= known.done) {
    return true;
  }
  const auto waiting = std::ranges::find(known.waiting, later, &std::pair<Stream, std::uint64_t>::first);
  return waiting != known.waiting.end() && tick <= waiting->second;
}

std::shared_ptr<const Readiness> StreamOrder::event_of(Stream earlier, std::uint64_t tick, std::uint64_t now,
                                                       bool& fresh) {
  Known& known = known_[earlier];
  fresh = !known.event || known.recorded < tick;
  return fresh ? record(earlier, now) : known.event;
}

std::shared_ptr<const Readiness> StreamOrder::record(Stream stream, std::uint64_t now) {
  Known& known = known_[stream];
  known.event.reset(); // so that the pool can reuse it, if no block waits for it
  const Event event = events_.record(stream);
  try {
    known.event = std::make_shared<const Readiness>(events_, stream, event);
  } catch (...) {
    events_.give(stream, event);
    throw;
  }
  known.recorded = now;
  return known.event;
}

void StreamOrder::note_wait(Stream earlier, Stream later) {
  Known& known = known_[earlier];
  const auto waiting = std::ranges::find(known.waiting, later, &std::pair<Stream, std::uint64_t>::first);
  if (waiting == known.waiting.end()) {
    known.waiting.emplace_back(later, known.recorded);
  } else {
    waiting->second = known.recorded;
  }
}

void StreamOrder::note_done(Stream earlier, std::uint64_t tick) {
  Known& known = known_[earlier];
  known.done = std::max(known.done, tick);
}

} // namespace torch_uvm
