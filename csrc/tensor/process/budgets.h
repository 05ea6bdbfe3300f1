// Requested budgets, and when they take effect: at once on a device that has had a managed allocation, on others with
// their first one. Until then the device is not queried, and an "auto" budget is not computed.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "config/budget_request.h"

namespace torch_uvm {

/// Requests a budget for one device, or (nullopt) for all devices, which replaces the requests of single devices. Each
/// call computes "auto" anew. \throws what the runtime throws; the previous request then stays
/// \param request nullopt clears the request; only valid for all devices
void request_budget(std::optional<int> device, const std::optional<BudgetRequest>& request);

/// Requests "auto" for all devices, unless there is a request for all devices already.
void request_default_budget();

/// The request that applies to a device; nullopt if there is none, and so no budget.
std::optional<BudgetRequest> requested_budget(int device);

/// The budget of a device in bytes; nullopt: none, as on a device that has one memory with the host. Before the
/// device's first managed allocation, the budget that it would get now; computing it creates the runtime. \throws
/// InvalidArgument; what the runtime throws
std::optional<std::size_t> budget_of(int device);

/// A warning if the budget is less than the requested bytes because the device has no more memory, or if there is none
/// because the device has one memory with the host; else nullopt. Creates the runtime if a size was requested.
std::optional<std::string> budget_was_cut(int device);

/// Applies the requested budget before a device's first managed allocation; one relaxed load afterwards. Does not
/// throw: if the device's free memory cannot be queried, it gets no budget, and a warning says so.
void start_budget(int device) noexcept;

/// As Context::load_options and Context::set_option, but also apply changed budgets, atomically with respect to
/// request_budget.
void load_options(std::string_view text);
void set_option(std::string_view key, std::string_view value);

} // namespace torch_uvm
