// The decisions that a policy follows for one iteration.
#pragma once

#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

/// Makes decisions by several rules, from the order of operators and from their durations, and keeps those with the
/// shortest prediction.
/// \param schedule its iteration has the operators' durations; its decisions are overwritten
void choose_fastest(Schedule& schedule, const PolicyOptions& options);

} // namespace torch_uvm::scheduling
