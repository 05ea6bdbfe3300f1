#include "residency/engine/durations.h"

namespace torch_uvm {

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

} // namespace torch_uvm
