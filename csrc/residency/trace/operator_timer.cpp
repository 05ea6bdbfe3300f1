#include "residency/trace/operator_timer.h"

#include <algorithm>

namespace torch_uvm {

namespace {

/// Operators that the device has not done yet, at most, for the host's time to be the program's. A driver queues about
/// a thousand kernels, and then the host waits for the device.
constexpr std::size_t kMaxBehind = 512;

} // namespace

OperatorTimer::OperatorTimer(ManagedRuntime& runtime, Report report)
    : runtime_(runtime), report_(std::move(report)), events_(runtime, runtime.device_count(), /*timing=*/true) {}

OperatorTimer::~OperatorTimer() {
  finish();
  report_finished();
  for (Operator& ended : ended_) {
    forget(ended);
  }
  events_.destroy_all();
}

void OperatorTimer::begin(Stream stream) noexcept {
  const double now = runtime_.host_ms();
  const bool idle = holds_ && is_idle(stream);
  // Else the device would have what was queued while it was held. Not if merely the hold has ended.
  latest_.timed.waited = idle && latest_.began_ms < held_until_ms_ && now - latest_.began_ms > kHoldMs / 4;
  finish();
  report_finished();
  latest_.timed.number = begun_++;
  latest_.stream = stream;
  latest_.began_ms = now;
  if (idle) {
    hold();
  }
  begin_part();
  engine_took(runtime_.host_ms() - now);
}

void OperatorTimer::end() noexcept {
  if (holds_) {
    const double now = runtime_.host_ms();
    end_part(latest_.stream);
    engine_took(runtime_.host_ms() - now);
  }
}

bool OperatorTimer::is_idle(Stream stream) noexcept {
  try {
    return runtime_.query_stream(stream);
  } catch (...) { // the runtime failed: the operator is timed at the host's pace
    return false;
  }
}

void OperatorTimer::hold() noexcept {
  try {
    runtime_.delay(1e3 * kHoldMs, latest_.stream);
    held_until_ms_ = latest_.began_ms + kHoldMs;
  } catch (...) { // as above
  }
}

void OperatorTimer::begin_part() noexcept {
  try {
    latest_.parts.reserve(latest_.parts.size() + 1);
    latest_.parts.emplace_back(events_.record(latest_.stream), Event{});
    latest_.running = true;
  } catch (...) {
    latest_.failed = true;
  }
}

bool OperatorTimer::end_part(Stream stream) noexcept {
  if (!latest_.running || latest_.stream != stream) {
    return false;
  }
  latest_.running = false;
  try {
    latest_.parts.back().second = events_.record(stream);
  } catch (...) {
    latest_.failed = true;
  }
  return true;
}

void OperatorTimer::finish() noexcept {
  end_part(latest_.stream);
  if (!latest_.parts.empty() && !latest_.failed) {
    try {
      latest_.kept_up = runtime_.query_event(latest_.parts.front().first);
      if (!latest_.timed.waited && ended_.size() < kMaxBehind) {
        latest_.timed.host_ms = std::max(0.0, runtime_.host_ms() - latest_.began_ms - latest_.engine_ms);
      }
      ended_.push_back(latest_);
      latest_.parts.clear(); // those of `ended_` are the same events
    } catch (...) { // no host memory: the operator is not timed
    }
  }
  forget(latest_);
  latest_ = Operator{};
}

bool OperatorTimer::report(Operator& done) {
  for (const auto& [begin, end] : done.parts) {
    if (!runtime_.query_event(end)) {
      return false;
    }
  }
  double& ms = done.timed.ms = 0;
  for (const auto& [begin, end] : done.parts) {
    ms += runtime_.elapsed_ms(begin, end);
  }
  if (done.kept_up) { // the device waited for the engine's work on the host
    ms = std::min(ms, std::max(ms - done.engine_ms, done.timed.host_ms));
  }
  report_(done.timed);
  return true;
}

void OperatorTimer::report_finished() noexcept {
  while (!ended_.empty()) {
    try {
      if (!report(ended_.front())) {
        return;
      }
    } catch (...) {
      // The device has failed, or its events cannot be read: the operator is not timed.
    }
    forget(ended_.front());
    ended_.pop_front();
  }
}

void OperatorTimer::forget(Operator& done) noexcept {
  for (const auto& [begin, end] : done.parts) {
    for (const Event event : {begin, end}) {
      if (event) {
        events_.give(done.stream, event);
      }
    }
  }
  done.parts.clear();
}

} // namespace torch_uvm
