// Modelled time: the host's clock, what occupies each link until when, and the cost of traffic.
//
// - Something starts when its stream has got there, the host had queued it, and its device is not stopped
//   by pages on their way to the host (a driver stops every launch for them).
// - The two directions of a device's link and copies within the device are three resources; whoever comes
//   later waits for his.
// - Streams keep their own clocks; the functions take a stream's time and give the new one.
//
// All times in microseconds. Not thread-safe: guarded by the runtime's mutex.
#pragma once

#include <vector>

#include "runtime/emulated/cost_profile.h"
#include "runtime/emulated/pages.h"

namespace torch_uvm::emulated {

class EmulatedClock {
 public:
  EmulatedClock(const CostProfile& profile, int devices)
      : profile_(profile), links_(static_cast<std::size_t>(devices)) {}

  double host() const {
    return host_us_;
  }
  /// A runtime call's own cost, for the caller.
  void call() {
    host_us_ += profile_.call_us;
  }
  /// The host waited until `time_us`.
  void host_waited(double time_us);

  double kernel(int device, double stream_us, const Traffic& traffic);
  /// What a kernel that has been launched touches besides.
  double more_of_kernel(int device, double stream_us, const Traffic& traffic);
  /// Queued work of a device that only writes what it touches.
  double fill(int device, double stream_us, double queued_us, const Traffic& traffic);
  double prefetch(int device, double stream_us, double queued_us, Location to, const Traffic& traffic);
  double discard(int device, double stream_us, double queued_us, std::size_t bytes);

  enum class CopyKind { kToDevice, kToHost, kWithinDevice, kBetweenDevices, kOnHost };
  struct Copy {
    CopyKind kind;
    int from = -1, to = -1; ///< devices, where there is one
    bool pageable = false; ///< a host side that is not pinned
    std::size_t bytes = 0;
  };
  double copy(int device, double stream_us, double queued_us, const Copy& copy, const Traffic& traffic);

  /// Host code touched memory.
  void host_touch(const Traffic& traffic);
  /// Room was made on a device while the host waited for it.
  void wait_for_room(int device, const Traffic& traffic);

  /// The latest of the host's clock and all links; streams are the caller's to add.
  double latest() const;

 private:
  struct Link {
    double to_device_us = 0; ///< busy until
    double to_host_us = 0;
    double internal_us = 0;
    double stopped_us = 0; ///< nothing starts on the device before
  };
  Link& link(int device) {
    return links_[static_cast<std::size_t>(device)];
  }
  double start(int device, double stream_us, double queued_us);
  /// Writes evicted pages back, which stops the device; gives when that is over.
  double write_back(int device, double start_us, std::size_t bytes);
  double serve(int device, double start_us, const Traffic& traffic);

  const CostProfile& profile_;
  double host_us_ = 0;
  std::vector<Link> links_;
};

} // namespace torch_uvm::emulated
