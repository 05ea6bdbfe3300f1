#include "runtime/emulated/counters.h"

#include <algorithm>

namespace torch_uvm::emulated {

EmulatedCounters CounterTable::total() const {
  EmulatedCounters sum;
  for (const EmulatedCounters& row : rows_) {
#define TORCH_UVM_ADD(name) sum.name += row.name;
    TORCH_UVM_EMULATED_COUNTERS(TORCH_UVM_ADD)
#undef TORCH_UVM_ADD
  }
  return sum;
}

void CounterTable::reset() {
  std::fill(rows_.begin(), rows_.end(), EmulatedCounters{});
}

} // namespace torch_uvm::emulated
