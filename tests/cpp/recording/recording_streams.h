// The recording runtime's streams: counters instead of work, and the positions that events mark.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

namespace torch_uvm::recording {

struct StreamState;

/// A point in a stream: reached when the work up to and including `position` is complete.
struct Point {
  std::shared_ptr<StreamState> stream; ///< null: never recorded
  std::uint64_t position = 0;
};

struct StreamState {
  bool held = false;
  std::uint64_t queued = 0;
  std::uint64_t done = 0;
  std::map<std::uint64_t, Point> waits; ///< from the position of a wait to the point that it waits for
};

struct EventState {
  int device = 0;
  bool timing = false;
  Point point;
};

/// Whether all work before the point is complete. Does not wait.
bool reached(const Point& point);

/// Performs a wait for the point: releases held work before it.
void force(const Point& point);

/// From now on, newly queued work stays incomplete. Work that could complete before is complete.
void hold(StreamState& stream);

} // namespace torch_uvm::recording
