// How much of a device's memory managed tensors may have: what a user asks for, and what it comes to.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/managed_runtime.h"

namespace torch_uvm {

struct BudgetRequest {
  enum class Kind {
    kAuto, ///< what the device has free when it is first used, less a reserve
    kNone, ///< no budget: residency is the driver's
    kBytes,
    kShare, ///< of all the memory that the device has
  };
  Kind kind = Kind::kAuto;
  std::size_t bytes = 0; ///< of kBytes
  double percent = 0.0; ///< of kShare: more than 0, at most 100
  bool operator==(const BudgetRequest&) const = default;
};

/// What parse_budget accepts, in words.
inline constexpr std::string_view kBudgetForms =
    "auto, none, bytes such as 20GiB, or a share of its memory such as 80%";

/// \throws InvalidArgument with the reason; a budget of nothing is refused, as elsewhere 0 means no bound
BudgetRequest parse_budget(std::string_view text);

/// As it may be parsed again.
std::string show_budget(const BudgetRequest& request);

struct Budget {
  std::size_t bytes = 0;
  bool hard = true; ///< beyond it there is OutOfMemory; else it is exceeded where nothing can be given up
};

/// \param memory of the device; as free counts, too, what managed tensors have there already
/// \return nullopt for no budget; never more bytes than the device has
std::optional<Budget> resolve_budget(const BudgetRequest& request, MemoryInfo memory);

} // namespace torch_uvm
