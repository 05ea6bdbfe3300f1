#include "residency/engine/device_state.h"

#include <algorithm>

#include "residency/engine/relocation_min.h"

namespace torch_uvm {
namespace {

constexpr std::size_t kRiseShare = 64; ///< a rise of up to 1/64 of the allocated bytes still counts as quiet

} // namespace

void Device::note_level(std::size_t bytes, std::uint64_t now) {
  quiet.peak = std::max(quiet.peak, bytes);
  // Tolerate slow growth, for example from steps that each append their loss to a list.
  if (bytes > quiet.level + std::max(quiet.level / kRiseShare, relocation_min())) {
    quiet.level = bytes;
    restart_quiet(now);
  }
}

void Device::restart_quiet(std::uint64_t now) {
  quiet.since = quiet.still_since = now;
  quiet.next_look = now + QuietPeriod::kMin;
  quiet.misses = loops.sum(&Policy::Counters::plan_misses);
}

void Device::time_operator(ManagedRuntime& runtime, const Decision& decision) noexcept {
  if (last_stream.is_host()) {
    return; // no operator with operands has run on the device yet
  }
  Loops::Loop& loop = loops.current();
  if (!decision.wants_durations) {
    loop.timer.reset();
    return;
  }
  try {
    if (!loop.timer) {
      loop.timer = std::make_unique<OperatorTimer>(
          runtime, [&to = loop.policy, before = loop.policy.operators()](const OperatorTimer::Timed& it) {
            to.ran(before + it.number, it.ms, it.in_place, it.host_ms, it.waited);
          });
      loop.timer->hold_from_now_on();
    }
  } catch (...) { // no host memory, or the runtime failed: nothing is timed
    return;
  }
  loop.timer->begin(last_stream);
}

} // namespace torch_uvm
