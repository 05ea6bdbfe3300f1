// The decisions among which a policy chooses for one iteration.
#pragma once

#include <vector>

#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

/// Makes decisions from the order of operators and from their durations, and predicts how long iterations take with
/// each.
/// \param schedule its iteration has the operators' durations; its decisions are overwritten
/// \return shortest prediction first
std::vector<Decisions> make_candidates(Schedule& schedule, const PolicyOptions& options);

} // namespace torch_uvm::scheduling
