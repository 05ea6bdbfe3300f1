#include "recording/recording_streams.h"

#include <algorithm>

namespace torch_uvm::recording {
namespace {

void finish(StreamState& stream, std::uint64_t position) {
  stream.done = std::max(stream.done, position);
  stream.waits.erase(stream.waits.begin(), stream.waits.upper_bound(stream.done));
}

// The last position before the first incomplete wait.
std::uint64_t reachable(const StreamState& stream) {
  for (const auto& [position, dependency] : stream.waits) {
    if (!reached(dependency)) {
      return position - 1;
    }
  }
  return stream.queued;
}

} // namespace

// A wait names only points that were recorded before it, so the recursion terminates. It ignores waits behind the point
// itself; otherwise two streams that wait for each other in turn would recurse for ever.
bool reached(const Point& point) {
  if (!point.stream || point.position <= point.stream->done) {
    return true;
  }
  StreamState& stream = *point.stream;
  if (stream.held) {
    return false;
  }
  for (const auto& [position, dependency] : stream.waits) {
    if (position > point.position) {
      break;
    }
    if (!reached(dependency)) {
      return false;
    }
  }
  finish(stream, point.position);
  return true;
}

void force(const Point& point) {
  if (reached(point)) {
    return;
  }
  StreamState& stream = *point.stream;
  stream.held = false;
  for (const auto& [position, dependency] : stream.waits) {
    if (position > point.position) {
      break;
    }
    force(dependency);
  }
  finish(stream, point.position);
}

void hold(StreamState& stream) {
  if (!stream.held) {
    finish(stream, reachable(stream));
    stream.held = true;
  }
}

} // namespace torch_uvm::recording
