// Modelled time: the host's clock, the links' busy times, and the cost of traffic.
//
// - An operation starts at the latest of three times: the stream's, the time at which the host queued it, and the end
//   of the device's write-backs to the host (during which the driver stops every launch).
// - Each device has three exclusive resources: the two directions of its link, and copies within the device. Copies of
//   pinned memory in both directions share what the link carries in all.
// - Each stream has its own clock. The functions take the stream's time and return the new one.
//
// All times are in microseconds. Not thread-safe: guarded by the runtime's mutex.
#pragma once

#include <vector>

#include "runtime/emulated/cost_profile.h"
#include "runtime/emulated/pages.h"
#include "runtime/link_clock.h"

namespace torch_uvm::emulated {

class EmulatedClock {
 public:
  EmulatedClock(const CostProfile& profile, int devices)
      : profile_(profile),
        links_(static_cast<std::size_t>(devices),
               Link{LinkClock(profile.copy_to_device_rate / kMicroseconds, profile.copy_to_host_rate / kMicroseconds,
                              profile.copy_both_ways_rate / kMicroseconds)}) {}

  double host() const {
    return host_us_;
  }
  /// Adds the fixed cost of a runtime call to the host's clock.
  void call() {
    host_us_ += profile_.call_us;
  }
  /// The host was blocked until `time_us`.
  void host_waited(double time_us);

  double kernel(int device, double stream_us, const Traffic& traffic);
  /// Accesses of a kernel that has been launched, or of a queued operation that only writes memory (zero_async).
  double serve(int device, double start_us, const Traffic& traffic);
  /// When an operation that was queued at `queued_us` begins.
  double start(int device, double stream_us, double queued_us);
  double prefetch(int device, double stream_us, double queued_us, Location to, const Traffic& traffic);
  double discard(int device, double stream_us, double queued_us, std::size_t bytes);

  struct Copy {
    int from = -1, to = -1; ///< devices; -1 for the host
    bool pageable = false; ///< a host side is not pinned
    std::size_t bytes = 0;
  };
  double copy(int device, double stream_us, double queued_us, const Copy& copy, const Traffic& traffic);

  /// Host code accessed memory.
  void host_touch(const Traffic& traffic);
  /// The host waited for evictions from a device.
  void wait_for_room(int device, const Traffic& traffic);

  /// The latest of the host's clock and all links' times. Does not include the streams' clocks.
  double latest() const;

 private:
  static constexpr double kMicroseconds = 1e6; ///< of a second
  struct Link {
    LinkClock ways;
    double internal_us = 0; ///< copies within the device are busy until then
    double stopped_us = 0; ///< no operation starts on the device before this time
  };
  Link& link(int device) {
    return links_[static_cast<std::size_t>(device)];
  }
  /// Writes evicted pages back, which stops the device. \return the end of the write-back
  double write_back(int device, double start_us, std::size_t bytes);
  /// A copy over the link. \return the end
  double cross(Link& link, LinkClock::Direction direction, double at, const Copy& copy) const;

  const CostProfile& profile_;
  double host_us_ = 0;
  std::vector<Link> links_;
};

} // namespace torch_uvm::emulated
