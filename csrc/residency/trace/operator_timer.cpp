#include "residency/trace/operator_timer.h"

#include <algorithm>

namespace torch_uvm {

namespace {

/// Operators that the device has not done yet, at most, for the host's time to be the program's. A driver queues about
/// a thousand kernels, and then the host waits for the device.
constexpr std::size_t kMaxBehind = 512;
constexpr double kWaitMs = 0.25; // shorter pauses of the host are not looked at

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
  const double now = runtime_.host_ms(), pause_ms = now - latest_.ended_ms;
  bool idle = false;
  try {
    idle = holds_ && runtime_.query_stream(stream);
    if (idle && pause_ms > kWaitMs && latest_.stream == stream && !latest_.parts.empty() && !latest_.running) {
      latest_.resumed = events_.record(stream);
      latest_.pause_ms = pause_ms;
    }
  } catch (...) { // the runtime failed: operators are timed at the host's pace
  }
  finish();
  report_finished();
  latest_.timed.number = begun_++;
  latest_.stream = stream;
  latest_.began_ms = latest_.ended_ms = now;
  try {
    if (idle) {
      runtime_.delay(1e3 * kHoldMs, stream);
    }
  } catch (...) { // as above
  }
  begin_part();
  engine_took(runtime_.host_ms() - now);
}

void OperatorTimer::end() noexcept {
  if (!holds_) {
    return;
  }
  const double now = latest_.ended_ms = runtime_.host_ms();
  try {
    // The device had work when the operator began.
    if (now - latest_.began_ms - latest_.engine_ms > kWaitMs && runtime_.query_stream(latest_.stream)) {
      latest_.timed.waited = true;
      latest_.began_ms = now - latest_.engine_ms; // what it took before was the wait
    }
  } catch (...) { // as above
  }
  end_part(latest_.stream);
  engine_took(runtime_.host_ms() - now);
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
      if (ended_.size() < kMaxBehind) {
        latest_.timed.host_ms = std::max(0.0, runtime_.host_ms() - latest_.began_ms - latest_.engine_ms);
      }
      ended_.push_back(latest_);
      latest_.parts.clear(); // those of `ended_` are the same events
      latest_.resumed = {};
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
  if (done.resumed) {
    if (!runtime_.query_event(done.resumed)) {
      return false;
    }
    const double waited = done.pause_ms - runtime_.elapsed_ms(done.parts.back().second, done.resumed);
    if (waited > kWaitMs) { // the device had work for that long
      done.timed.waited = true;
      done.timed.host_ms = std::max(0.0, done.timed.host_ms - waited);
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
  const auto give = [&](Event event) {
    if (event) {
      events_.give(done.stream, event);
    }
  };
  for (const auto& [begin, end] : done.parts) {
    give(begin);
    give(end);
  }
  give(done.resumed);
  done.parts.clear();
  done.resumed = {};
}

} // namespace torch_uvm
