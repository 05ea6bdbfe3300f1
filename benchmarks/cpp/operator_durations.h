// The duration of each operator of an access trace if all its operands are on the device.
#pragma once

#include <algorithm>
#include <cmath>
#include <string_view>
#include <vector>

#include "access_trace.h"
#include "runtime/emulated/cost_profile.h"

namespace play {

struct Arithmetic {
  double flops = 600e12; ///< FLOP/s of matrix products
  std::size_t item_bytes = 2; ///< size of an element in bytes
};

/// The operator's arithmetic or its bytes, whichever takes longer, and at least a launch.
inline double modelled_ms(const Op& op, const std::map<Id, std::size_t>& sizes, const torch_uvm::CostProfile& costs,
                          const Arithmetic& arithmetic) {
  std::vector<double> operands;
  for (const Use& use : op.uses) {
    operands.push_back(static_cast<double>(sizes.at(use.id)));
  }
  for (const Made& made : op.births) {
    operands.push_back(static_cast<double>(made.bytes));
  }
  double bytes = 0;
  for (const double operand : operands) {
    bytes += operand;
  }
  double flops = 0;
  const auto is = [&](std::string_view part) { return op.name.find(part) != op.name.npos; };
  if (operands.size() >= 3 && (is("mm") || is("linear") || is("conv"))) { // (m k)(k n)(m n) = (m k n)^2
    std::ranges::sort(operands, std::greater{});
    flops = 2 * std::sqrt(operands[0] * operands[1] * operands[2] /
                          std::pow(static_cast<double>(arithmetic.item_bytes), 3));
  }
  return std::max({costs.launch_us / 1e3, bytes / costs.device_memory_rate * 1e3, flops / arithmetic.flops * 1e3});
}

/// By operator of the trace. Operators of a measured group share its time in the ratio of their modelled durations.
/// Others have their modelled duration.
inline std::vector<double> durations_ms(const Trace& trace, const torch_uvm::CostProfile& costs,
                                        const Arithmetic& arithmetic) {
  std::vector<double> durations;
  for (const Op& op : trace.ops) {
    durations.push_back(modelled_ms(op, trace.bytes, costs, arithmetic));
  }
  for (const Group& group : trace.groups) {
    const auto begin = durations.begin() + static_cast<std::ptrdiff_t>(group.first);
    const auto end = begin + static_cast<std::ptrdiff_t>(group.ops);
    double modelled = 0;
    for (auto each = begin; each != end; ++each) {
      modelled += *each;
    }
    for (auto each = begin; each != end; ++each) {
      *each *= group.us / 1e3 / modelled;
    }
  }
  return durations;
}

} // namespace play
