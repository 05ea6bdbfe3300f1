#include "runtime/emulated/clock.h"

#include <algorithm>

namespace torch_uvm::emulated {
namespace {

constexpr double kMicroseconds = 1e6;

double time_of(std::size_t bytes, double rate) {
  return static_cast<double>(bytes) / rate * kMicroseconds;
}

// Occupies a resource for `duration_us`, from `start_us` or from when it is free. Returns the end.
double occupy(double& busy_us, double start_us, double duration_us) {
  busy_us = std::max(busy_us, start_us) + duration_us;
  return busy_us;
}

} // namespace

void EmulatedClock::host_waited(double time_us) {
  host_us_ = std::max(host_us_, time_us);
}

double EmulatedClock::start(int device, double stream_us, double queued_us) {
  return std::max({stream_us, queued_us, link(device).stopped_us});
}

double EmulatedClock::write_back(int device, double start_us, std::size_t bytes) {
  if (bytes == 0) {
    return start_us;
  }
  Link& own = link(device);
  own.stopped_us = occupy(own.to_host_us, start_us, time_of(bytes, profile_.prefetch_to_host_rate));
  return own.stopped_us;
}

double EmulatedClock::serve(int device, double start_us, const Traffic& traffic) {
  Link& own = link(device);
  double now = write_back(device, start_us, traffic.written_back);
  now += time_of(traffic.populated, profile_.fault_populate_rate);
  const double inwards = time_of(traffic.moved, profile_.fault_to_device_rate) +
                         time_of(traffic.in_place_faulted, profile_.in_place_fault_rate) +
                         time_of(traffic.in_place_read, profile_.in_place_rate);
  const double outwards = time_of(traffic.in_place_written, profile_.in_place_rate);
  // A kernel reads and writes over the link concurrently.
  double end = now;
  if (inwards > 0) {
    end = std::max(end, occupy(own.to_device_us, now, inwards));
  }
  if (outwards > 0) {
    end = std::max(end, occupy(own.to_host_us, now, outwards));
  }
  return end + time_of(traffic.local, profile_.device_memory_rate);
}

double EmulatedClock::kernel(int device, double stream_us, const Traffic& traffic) {
  const double begin = start(device, stream_us, host_us_);
  // The launch is asynchronous, but takes the host launch_us. So the launch rate bounds the rate of small kernels.
  host_us_ += profile_.launch_us;
  return serve(device, begin + profile_.launch_us, traffic);
}

double EmulatedClock::more_of_kernel(int device, double stream_us, const Traffic& traffic) {
  return serve(device, stream_us, traffic);
}

double EmulatedClock::fill(int device, double stream_us, double queued_us, const Traffic& traffic) {
  return serve(device, start(device, stream_us, queued_us), traffic);
}

double EmulatedClock::prefetch(int device, double stream_us, double queued_us, Location to, const Traffic& traffic) {
  double now = start(device, stream_us, queued_us);
  if (traffic.moved > 0 || traffic.populated > 0) {
    now += profile_.prefetch_us;
  }
  if (to.is_host()) {
    now += time_of(traffic.populated, profile_.host_memory_rate);
    for (std::size_t source = 0; source < links_.size(); ++source) {
      if ((traffic.sources & bit(static_cast<int>(source))) != 0) {
        now = write_back(static_cast<int>(source), now, traffic.moved);
      }
    }
    if (traffic.moved > 0) {
      host_waited(now); // a prefetch to the host blocks the caller
    }
    return now;
  }
  now = write_back(to.index, now, traffic.written_back);
  now += time_of(traffic.populated, profile_.prefetch_populate_rate);
  if (traffic.moved > 0) {
    now = occupy(link(to.index).to_device_us, now, time_of(traffic.moved, profile_.prefetch_to_device_rate));
  }
  return now;
}

double EmulatedClock::discard(int device, double stream_us, double queued_us, std::size_t bytes) {
  return start(device, stream_us, queued_us) + time_of(bytes, profile_.discard_rate);
}

double EmulatedClock::copy(int device, double stream_us, double queued_us, const Copy& copy, const Traffic& traffic) {
  double now = write_back(device, start(device, stream_us, queued_us), traffic.written_back);
  now += time_of(traffic.populated, profile_.prefetch_populate_rate);
  switch (copy.kind) {
    case CopyKind::kToDevice:
      now = occupy(link(copy.to).to_device_us, now,
                   time_of(copy.bytes, copy.pageable ? profile_.pageable_copy_rate : profile_.copy_to_device_rate));
      break;
    case CopyKind::kToHost:
      now = occupy(link(copy.from).to_host_us, now,
                   time_of(copy.bytes, copy.pageable ? profile_.pageable_copy_rate : profile_.copy_to_host_rate));
      break;
    case CopyKind::kWithinDevice:
      now = occupy(link(copy.to).internal_us, now, time_of(copy.bytes, profile_.device_copy_rate));
      break;
    case CopyKind::kBetweenDevices: {
      double& leaving = link(copy.from).to_host_us;
      double& arriving = link(copy.to).to_device_us;
      now = occupy(leaving, std::max(now, arriving), time_of(copy.bytes, profile_.peer_copy_rate));
      arriving = now;
      break;
    }
    case CopyKind::kOnHost:
      now += time_of(copy.bytes, profile_.pageable_copy_rate);
      break;
  }
  if (copy.pageable) {
    host_waited(now); // a pageable copy blocks the caller
  }
  return now;
}

void EmulatedClock::host_touch(const Traffic& traffic) {
  double now = host_us_;
  const double faulting = time_of(traffic.moved, profile_.fault_to_host_rate);
  double end = now + faulting;
  for (std::size_t source = 0; source < links_.size(); ++source) {
    if ((traffic.sources & bit(static_cast<int>(source))) != 0) {
      end = std::max(end, occupy(links_[source].to_host_us, now, faulting));
    }
  }
  host_us_ = end + time_of(traffic.populated + traffic.local, profile_.host_memory_rate) +
             time_of(traffic.in_place_read + traffic.in_place_written, profile_.in_place_rate);
}

void EmulatedClock::wait_for_room(int device, const Traffic& traffic) {
  host_waited(write_back(device, host_us_, traffic.written_back));
}

double EmulatedClock::latest() const {
  double latest = host_us_;
  for (const Link& each : links_) {
    latest = std::max({latest, each.to_device_us, each.to_host_us, each.internal_us, each.stopped_us});
  }
  return latest;
}

} // namespace torch_uvm::emulated
