// How long an iteration takes that follows a schedule.
#pragma once

#include <cstddef>

#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

/// Simulates operators and both directions of the link until the steady state. Operators run one after the other, and
/// each direction carries one transfer at a time; together they reach `LinkRates::both`. A fetch begins once it is
/// issued and there is room for it. An operator begins once its operands are resident and there is room for its
/// results. Copies beside an operator slow it. A use in place takes at least as long as the bytes need to cross the
/// link. The host starts the transfers and queues the operators one after the other, and the program waits for the
/// device once an iteration. Memory has no fragments.
/// \return milliseconds; infinity if an operator or a fetch finds no room
double predict_ms(const Schedule& schedule, const LinkRates& rates, std::size_t capacity);

} // namespace torch_uvm::scheduling
