// The one table of options. It feeds the environment variable TORCH_UVM_CONF, the setters and the
// printed dump, so that the three cannot disagree. A wrong key or value fails by name.
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

/// What the CUDA runtime is made from.
struct CudaConfig {
  bool pool_segments = false; ///< segments come from a memory pool of the driver, not from cudaMallocManaged
  bool operator==(const CudaConfig&) const = default;
};

struct Options {
  std::optional<std::size_t> limit; ///< managed bytes in all; nullopt: what the host has available
  std::optional<BudgetRequest> budget; ///< of each device; nullopt: nobody has asked, and there is none yet
  std::map<int, BudgetRequest> device_budgets; ///< of single devices, in place of `budget`; no row of the table
  std::optional<std::size_t> host_limit; ///< pinned bytes for host copies; nullopt: what the host has available
  std::optional<std::size_t> staging; ///< bytes of a slot of plain device memory for copies; nullopt: as the device is
  std::size_t relocation_min = kDefaultRelocationMin; ///< bytes of the smallest storage that the residency engine moves
  bool zero_on_alloc = false; ///< managed memory that a tensor gets is zeroed
  bool deferred_optimizers = false; ///< an optimizer's updates wait for the parameters' next use
  AllocatorOptions allocator;
  EmulatedConfig emulated; ///< of the emulated accelerator: emulated_devices, emulated_memory, ...
  CudaConfig cuda;
};

/// A row of the table, as documentation, dump and error messages need it.
struct OptionInfo {
  std::string key;
  std::string accepted; ///< "bytes such as 4GiB, or none"
  std::string description;
  std::string default_value;
  std::string value; ///< in the Options it was made from
};

/// Parses "key:value,key:value"; the empty string is the defaults. Values are not changed by an error.
/// \throws InvalidArgument naming the key or value, what is accepted, and the nearest key for a typo;
///         also for a key given twice
Options parse_options(std::string_view text);

/// Sets one option by name. Strong guarantee.
/// \throws InvalidArgument as parse_options
void set_option(Options& options, std::string_view key, std::string_view value);

/// Every option, in the order of the table.
std::vector<OptionInfo> describe_options(const Options& options);

} // namespace torch_uvm
