// Requested budgets, and when they take effect: at once on a device that has had a managed allocation, on others with
// their first one. Until then the device is not queried, and an "auto" budget is not computed.
#pragma once

#include <c10/util/Exception.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include "config/options.h"

namespace torch_uvm {

/// Requests a budget for one device, or (nullopt) for all devices, which replaces the requests of single devices. Each
/// call computes "auto" anew. \throws what the runtime throws; the previous request then stays
/// \param request nullopt clears the request; only valid for all devices
void request_budget(std::optional<int> device, const std::optional<BudgetRequest>& request);

/// Requests "auto" for all devices, unless there is a request for all devices already.
void request_default_budget();

/// The budget of a device in bytes; nullopt: none, as on a device that has one memory with the host. Before the
/// device's first managed allocation, the budget that it would get now; computing it creates the runtime. \throws
/// InvalidArgument; what the runtime throws
std::optional<std::size_t> budget_of(int device);

/// A warning about the budget in force; nullopt if there is nothing to say. That it is less than the requested bytes,
/// because of the device's memory or the limit; that there is none, because the device has one memory with the host;
/// or, once per process, that "none" leaves residency to the driver. Creates the runtime if a size was requested.
std::optional<std::string> budget_warning(int device);

/// Applies the requested budget before a device's first managed allocation. Afterwards fits an automatic budget to the
/// device's free memory from time to time; a few ns otherwise. Call with no lock held but the GIL. Does not throw: if
/// the device's free memory cannot be queried, it gets no budget, and a warning says so.
void start_budget(int device) noexcept;

/// The second part of `start_budget`, for other memory of the device.
void look_at_budget(int device) noexcept;

/// Fits the automatic budget of a device to the memory that the device has free now. Shrinking it returns managed
/// memory to the device. A budget in bytes, or a share, never changes here. Call with no lock held but the GIL.
/// \param wanted bytes of other memory that the device has just refused; 0: none
/// \return whether the budget shrank
bool fit_automatic_budget(int device, std::size_t wanted) noexcept;

/// For an error that plain memory of a device ran out: that its budget was given by the user and so did not shrink. ""
/// without such a budget.
std::string explain_kept_budget(int device) noexcept;

/// Calls `allocate`, which allocates other memory of a device. If it is out of memory, fits the automatic budget and
/// calls it again. \param device_of called only then
template <typename DeviceOf, typename Allocate>
auto with_fitted_budget(DeviceOf device_of, std::size_t bytes, Allocate allocate) {
  constexpr int kMaxFits = 3; // one will do, unless other threads take what was returned
  for (int fits = 0;; ++fits) {
    try {
      return allocate();
    } catch (c10::OutOfMemoryError& error) {
      const int device = device_of();
      if (fits == kMaxFits || !fit_automatic_budget(device, bytes)) {
        if (std::string kept = explain_kept_budget(device); !kept.empty()) {
          error.add_context(std::move(kept));
        }
        throw;
      }
    }
  }
}

/// Reduces the budgets so that they leave the limit of managed memory room for an allocation with the host as its home.
/// Call with no lock held but the GIL. \return whether they do
bool leave_limit_to_host(std::size_t wanted) noexcept;

/// The limit of pinned host memory in force; before the first budget, the one that would be now. nullopt: none
std::optional<std::size_t> host_limit_in_force();

/// As Context::change_options, but also applies budgets that changed and those that a changed limit allows, atomically
/// with respect to request_budget. \throws what applying them throws, too; the options are then as before
void change_options(const std::function<void(Options&)>& change);

} // namespace torch_uvm
