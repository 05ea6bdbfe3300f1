#include "allocator/statistics.h"

namespace torch_uvm {

std::vector<std::pair<std::string, std::int64_t>> Statistics::flatten() const {
  constexpr std::array<const char*, kPoolKinds> kPools{"all", "small_pool", "large_pool"};
  std::vector<std::pair<std::string, std::int64_t>> flat;
  const auto add = [&](const std::string& name, const StatArray& stats) {
    for (std::size_t kind = 0; kind < kPoolKinds; ++kind) {
      const std::string prefix = name + "." + kPools[kind] + ".";
      flat.emplace_back(prefix + "current", stats[kind].current);
      flat.emplace_back(prefix + "peak", stats[kind].peak);
      flat.emplace_back(prefix + "allocated", stats[kind].allocated);
      flat.emplace_back(prefix + "freed", stats[kind].freed);
    }
  };
#define TORCH_UVM_ADD(name) add(#name, name);
  TORCH_UVM_STAT_ARRAYS(TORCH_UVM_ADD)
#undef TORCH_UVM_ADD
#define TORCH_UVM_ADD(name) flat.emplace_back(#name, name);
  TORCH_UVM_STAT_COUNTS(TORCH_UVM_ADD)
#undef TORCH_UVM_ADD
  return flat;
}

} // namespace torch_uvm
