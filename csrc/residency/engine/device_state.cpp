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
  quiet.misses = policy->counters().plan_misses;
}

} // namespace torch_uvm
