// The recording runtime's streams: counters instead of work, and the places in them that events mark.
#pragma once

#include <cstdint>
#include <map>
#include <memory>

namespace torch_uvm::recording {

struct StreamState;

/// A place in a stream: reached when the work up to and including `position` is done.
struct Point {
  std::shared_ptr<StreamState> stream; ///< null: never recorded
  std::uint64_t position = 0;
};

struct StreamState {
  bool held = false;
  std::uint64_t queued = 0;
  std::uint64_t done = 0;
  std::map<std::uint64_t, Point> waits; ///< position of a wait -> what it waits for
};

struct EventState {
  int device = 0;
  bool timing = false;
  Point point;
};

/// Whether all before the point is done, without a wait for it.
bool reached(const Point& point);

/// On a wait for the point: releases what is held before it.
void force(const Point& point);

/// From now on what is queued stays unfinished; what could be done before is done.
void hold(StreamState& stream);

} // namespace torch_uvm::recording
