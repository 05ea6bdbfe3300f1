#include "runtime/emulated/clock.h"

#include <algorithm>

namespace torch_uvm::emulated {
namespace {

double time_of(std::size_t bytes, double rate) {
  return static_cast<double>(bytes) / rate * 1e6;
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
  own.stopped_us = own.ways.occupy(LinkClock::kToHost, start_us, time_of(bytes, profile_.prefetch_to_host_rate));
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
    end = std::max(end, own.ways.occupy(LinkClock::kToDevice, now, inwards));
  }
  if (outwards > 0) {
    end = std::max(end, own.ways.occupy(LinkClock::kToHost, now, outwards));
  }
  return end + time_of(traffic.local, profile_.device_memory_rate);
}

double EmulatedClock::kernel(int device, double stream_us, const Traffic& traffic) {
  const double begin = start(device, stream_us, host_us_);
  // The launch is asynchronous, but takes the host launch_us. So the launch rate bounds the rate of small kernels.
  host_us_ += profile_.launch_us;
  return serve(device, begin + profile_.launch_us, traffic);
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
    now =
        link(to.index).ways.occupy(LinkClock::kToDevice, now, time_of(traffic.moved, profile_.prefetch_to_device_rate));
  }
  return now;
}

double EmulatedClock::discard(int device, double stream_us, double queued_us, std::size_t bytes) {
  return start(device, stream_us, queued_us) + time_of(bytes, profile_.discard_rate);
}

double EmulatedClock::cross(Link& link, LinkClock::Direction direction, double at, const Copy& copy) const {
  return copy.pageable ? link.ways.occupy(direction, at, time_of(copy.bytes, profile_.pageable_copy_rate))
                       : link.ways.copy(direction, at, static_cast<double>(copy.bytes));
}

double EmulatedClock::copy(int device, double stream_us, double queued_us, const Copy& copy, const Traffic& traffic) {
  double now = write_back(device, start(device, stream_us, queued_us), traffic.written_back);
  now += time_of(traffic.populated, profile_.prefetch_populate_rate);
  if (copy.from < 0 && copy.to < 0) {
    now += time_of(copy.bytes, profile_.pageable_copy_rate);
  } else if (copy.from < 0) {
    now = cross(link(copy.to), LinkClock::kToDevice, now, copy);
  } else if (copy.to < 0) {
    now = cross(link(copy.from), LinkClock::kToHost, now, copy);
  } else if (copy.from == copy.to) {
    double& busy_us = link(copy.to).internal_us;
    now = busy_us = std::max(busy_us, now) + time_of(copy.bytes, profile_.device_copy_rate);
  } else {
    LinkClock &leaving = link(copy.from).ways, &arriving = link(copy.to).ways;
    now = std::max({now, leaving.free_at(LinkClock::kToHost), arriving.free_at(LinkClock::kToDevice)});
    const double takes = time_of(copy.bytes, profile_.peer_copy_rate);
    leaving.occupy(LinkClock::kToHost, now, takes);
    now = arriving.occupy(LinkClock::kToDevice, now, takes);
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
      end = std::max(end, links_[source].ways.occupy(LinkClock::kToHost, now, faulting));
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
    latest = std::max({latest, each.ways.free_at(LinkClock::kToDevice), each.ways.free_at(LinkClock::kToHost),
                       each.internal_us, each.stopped_us});
  }
  return latest;
}

} // namespace torch_uvm::emulated
