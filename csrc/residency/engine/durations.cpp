#include "residency/engine/durations.h"

namespace torch_uvm {

void Durations::begin(const Decision& decision, Stream stream, OperatorKey key) noexcept {
  if (stream.is_host()) {
    return; // no operator with operands has run on the device yet
  }
  if (!decision.wants_durations) {
    timer_.reset();
    return;
  }
  try {
    if (!timer_) {
      timer_ = std::make_unique<OperatorTimer>(
          runtime_, [this, before = policy_.operators()](const OperatorTimer::Timed& timed) {
            const std::uint64_t first = before + timed.first;
            policy_.ran(first, first + timed.operators - 1, timed.us / 1e3, timed.in_place, timed.host_us / 1e3);
          });
    }
  } catch (...) { // no host memory, or the runtime failed: nothing is timed
    return;
  }
  timer_->begin(stream, key);
}

} // namespace torch_uvm
