// Budgets as they were asked for, and when they come into force: on a device that has managed memory at once, on
// another with its first managed allocation. Until then nothing is asked of a device, and "auto" is not measured.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "config/budget_request.h"

namespace torch_uvm {

/// Of one device, or (nullopt) of all of them, which takes the place of what single devices were given. "auto" is
/// measured anew each time. \throws what the runtime throws; then what was asked for before stays so
/// \param request nullopt: as if nobody had ever asked; of all devices only
void request_budget(std::optional<int> device, const std::optional<BudgetRequest>& request);

/// "auto" for all devices, unless somebody has asked for anything already.
void request_default_budget();

/// nullopt: nobody has asked, and the device has no budget.
std::optional<BudgetRequest> requested_budget(int device);

/// The bytes of a device's budget: those in force, or, before its first managed allocation, those that it would have
/// now, which makes the runtime. nullopt: none. \throws InvalidArgument; what the runtime throws
std::optional<std::size_t> budget_of(int device);

/// A sentence where the budget in force is less than the bytes asked for, as the device has no more; else nullopt.
std::optional<std::string> budget_was_cut(int device);

/// Before managed memory is allocated for a device; one relaxed load but for the first time. Does not throw: a
/// device that cannot say what it has free gets no budget.
void start_budget(int device) noexcept;

/// As Context::load_options and Context::set_option; puts in force what they say of budgets. No request for a budget
/// comes in between.
void load_options(std::string_view text);
void set_option(std::string_view key, std::string_view value);

} // namespace torch_uvm
