// The option table. The parser of TORCH_UVM_CONF, the setters and the printed dump all use it, so they cannot disagree.
// The error for a wrong key or value names it.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "config/budget_request.h"
#include "runtime/emulated/model.h"

namespace torch_uvm {

inline constexpr std::size_t kDefaultRelocationMin = 256 * 1024;

struct Options {
  std::optional<std::size_t> limit; ///< total managed bytes; nullopt: what the host has available
  std::optional<BudgetRequest> budget; ///< for each device; nullopt: not set, and there is no budget yet
  std::map<int, BudgetRequest> device_budgets; ///< per-device overrides of `budget`; not in the option table
  bool automatic_host_limit = true; ///< `host_limit` is what the host can spare when a budget takes effect
  std::optional<std::size_t> host_limit; ///< pinned bytes for host copies; nullopt: automatic, or no limit
  std::optional<std::size_t> staging; ///< bytes per staging slot of plain device memory; nullopt: chosen per device
  std::size_t relocation_min = kDefaultRelocationMin; ///< smallest storage that the residency engine relocates
  bool zero_on_alloc = false; ///< zero the managed memory of new tensors
  std::string optimizer = "auto"; ///< when optimizers update parameters: in_place, deferred or auto
  AllocatorOptions allocator;
  EmulatedConfig emulated; ///< the options emulated_devices, emulated_memory, ...
};

/// A row of the option table, for documentation, the dump and error messages.
struct OptionInfo {
  std::string key;
  std::string accepted; ///< "bytes such as 4GiB, or none"
  std::string description;
  std::string default_value;
  std::string value; ///< current value
};

/// Parses "key:value,key:value". The empty string gives the defaults.
/// \throws InvalidArgument naming the key or value and what is accepted; also for a duplicate key
Options parse_options(std::string_view text);

/// Sets one option by name. Strong guarantee.
/// \throws InvalidArgument as parse_options
void set_option(Options& options, std::string_view key, std::string_view value);

/// Every option, in the order of the table.
std::vector<OptionInfo> describe_options(const Options& options);

} // namespace torch_uvm
