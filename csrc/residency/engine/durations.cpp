#include "residency/engine/durations.h"

#include <algorithm>

#include "runtime/bytes.h"

namespace torch_uvm {

namespace {

constexpr std::size_t kProbeBytes = 32 * MiB; // smaller copies are slower than the link
constexpr int kProbes = 3; // the first one warms up
/// Kernels that use host memory reach this part of the rate of a copy to the device (an H200: 51.2 of 55.4 GB/s).
constexpr double kInPlaceShare = 0.92;

double rate_of(ManagedRuntime& runtime, void* to, const void* from, Stream stream, Event begin, Event end) {
  double best_ms = 0;
  for (int probe = 0; probe < kProbes; ++probe) {
    runtime.record_event(begin, stream);
    runtime.copy_async(to, from, kProbeBytes, stream);
    runtime.record_event(end, stream);
    runtime.synchronize_event(end);
    const double ms = runtime.elapsed_ms(begin, end);
    best_ms = probe == 0 ? ms : std::min(best_ms, ms);
  }
  return best_ms > 0 ? static_cast<double>(kProbeBytes) / best_ms : 0;
}

} // namespace

Durations::Durations(ManagedRuntime& runtime, Policy& policy)
    : runtime_(runtime), policy_(policy), events_(runtime, runtime.device_count(), /*timing=*/true) {}

Durations::~Durations() {
  timer_.reset();
  for (const Mark& mark : marks_) {
    events_.give(mark.stream, mark.event);
  }
  events_.destroy_all();
}

void Durations::begin(const Decision& decision, Stream stream, OperatorKey key) noexcept {
  if (stream.is_host()) {
    return; // no operator with operands has run on the device yet
  }
  try {
    if (!decision.wants_durations) {
      timer_.reset();
    } else if (!timer_) {
      timer_ = std::make_unique<OperatorTimer>(
          runtime_, [this, before = policy_.operators()](const OperatorTimer::Timed& timed) {
            const std::uint64_t first = before + timed.first;
            policy_.ran(first, first + timed.operators - 1, timed.us / 1e3, timed.in_place);
          });
    }
    if (decision.mark != 0) {
      add_mark(decision, stream);
    }
  } catch (...) { // no host memory, or the runtime failed: nothing is timed
    timer_.reset();
  }
  if (timer_) {
    timer_->begin(stream, key);
  }
}

void Durations::add_mark(const Decision& decision, Stream stream) {
  Mark mark{decision.mark, decision.is_whole, stream, events_.record(stream)};
  try {
    marks_.push_back(mark);
  } catch (...) {
    events_.give(stream, mark.event);
    throw;
  }
  report_iterations();
}

void Durations::report_iterations() {
  while (marks_.size() > 1 && runtime_.query_event(marks_[1].event)) {
    const Mark begun = marks_.front();
    const Mark& ended = marks_[1];
    if (ended.is_whole && begun.stream == ended.stream) {
      policy_.took(begun.number, runtime_.elapsed_ms(begun.event, ended.event));
    }
    marks_.pop_front();
    events_.give(begun.stream, begun.event);
  }
}

LinkRates measure_link(ManagedRuntime& runtime, Stream stream) noexcept {
  LinkRates rates;
  void* pinned = nullptr;
  void* plain = nullptr;
  Event begin, end;
  try {
    pinned = runtime.allocate_pinned(kProbeBytes);
    plain = runtime.allocate_device(kProbeBytes, stream.device);
    begin = runtime.create_event(stream.device, /*timing=*/true);
    end = runtime.create_event(stream.device, /*timing=*/true);
    const double into = rate_of(runtime, plain, pinned, stream, begin, end);
    const double out = rate_of(runtime, pinned, plain, stream, begin, end);
    if (into > 0 && out > 0) {
      rates = {into, out, kInPlaceShare * into};
    }
  } catch (...) {
    // The defaults stand. An error of the runtime shows at the next call that needs it.
  }
  for (const Event event : {begin, end}) {
    if (event) {
      runtime.destroy_event(event);
    }
  }
  if (plain != nullptr) {
    runtime.free_device(plain);
  }
  if (pinned != nullptr) {
    runtime.free_pinned(pinned);
  }
  return rates;
}

} // namespace torch_uvm
