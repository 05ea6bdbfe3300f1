// When copies over a link between host and device end, in modelled time.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <deque>
#include <utility>

namespace torch_uvm {

/// Each direction carries one copy at a time, in the order of the calls. While both are busy, the later call gets what
/// the earlier one leaves of the rate of both. The units of time and bytes are the caller's.
class LinkClock {
 public:
  enum Direction : std::size_t { kToDevice, kToHost };

  /// \param to_device, to_host rates of a copy while the other direction is idle
  /// \param both ways together
  LinkClock(double to_device, double to_host, double both)
      : rates_{to_device, to_host}, beside_{left(to_device, both - to_host), left(to_host, both - to_device)} {}

  /// From when on a direction is free.
  double free_at(Direction direction) const {
    return lanes_[direction].free_at;
  }

  /// Copies at `at`, or once the direction is free. \return the end
  double copy(Direction direction, double at, double bytes) {
    Lane& lane = lanes_[direction];
    std::deque<Span>& others = lanes_[1 - direction].copies;
    while (!others.empty() && others.front().second <= lane.free_at) {
      others.pop_front(); // no copy of this direction can begin before that any more
    }
    const double begin = std::max(at, lane.free_at);
    double now = begin;
    for (const auto& [other_begin, other_end] : others) {
      if (other_end <= now) {
        continue;
      }
      if (now + bytes / rates_[direction] <= other_begin) {
        break;
      }
      bytes -= std::max(0.0, other_begin - now) * rates_[direction];
      now = std::max(now, other_begin);
      const double moved = std::min(bytes, (other_end - now) * beside_[direction]);
      bytes -= moved;
      now += moved / beside_[direction];
    }
    return occupy(lane, begin, now + bytes / rates_[direction]);
  }

  /// Other traffic of one direction, which takes `duration` and nothing from the other one. \return the end
  double occupy(Direction direction, double at, double duration) {
    Lane& lane = lanes_[direction];
    return lane.free_at = std::max(at, lane.free_at) + duration;
  }

 private:
  using Span = std::pair<double, double>; ///< from, until
  struct Lane {
    double free_at = 0;
    std::deque<Span> copies; ///< beside which the other direction may still copy, merged
  };
  static constexpr std::size_t kMostSpans = 4096; ///< older ones are forgotten: the other direction may be unused

  static double left(double alone, double of_both) {
    return std::clamp(of_both, alone / 16, alone); // above 0, so that a copy ends
  }

  static double occupy(Lane& lane, double begin, double end) {
    if (!lane.copies.empty() && lane.copies.back().second == begin) {
      lane.copies.back().second = end;
    } else {
      lane.copies.emplace_back(begin, end);
    }
    if (lane.copies.size() > kMostSpans) {
      lane.copies.pop_front();
    }
    return lane.free_at = end;
  }

  std::array<double, 2> rates_, beside_;
  std::array<Lane, 2> lanes_;
};

} // namespace torch_uvm
