// Device budgets: the device memory that managed tensors may use, as requested by the user and as resolved for a
// device.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

struct BudgetRequest {
  enum class Kind {
    kAuto, ///< the free memory at the device's first use, minus a reserve
    kNone, ///< no budget: the driver controls residency
    kBytes,
    kShare, ///< a share of the device's total memory
  };
  Kind kind = Kind::kAuto;
  std::size_t bytes = 0; ///< for kBytes
  double percent = 0.0; ///< for kShare; in (0, 100]
  bool operator==(const BudgetRequest&) const = default;
};

/// The forms that parse_budget accepts, for messages.
inline constexpr std::string_view kBudgetForms =
    "auto, none, bytes such as 20GiB, or a share of its memory such as 80%";

/// \throws InvalidArgument with the reason. 0 bytes are refused, because 0 means no limit elsewhere
BudgetRequest parse_budget(std::string_view text);

/// Formats a request so that parse_budget can read it.
std::string show_budget(const BudgetRequest& request);

struct Budget {
  std::size_t bytes = 0;
  std::size_t ceiling = 0; ///< a single operator may exceed the budget up to here
};

/// \param memory of the device; `free` includes the memory that managed tensors already use there
/// \return nullopt for no budget; never more than is free. Its ceiling is "auto", or the budget if that is more
std::optional<Budget> resolve_budget(const BudgetRequest& request, MemoryInfo memory);

} // namespace torch_uvm
