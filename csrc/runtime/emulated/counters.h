// The counters of an emulated runtime.
#pragma once

#include <vector>

#include "runtime/emulated/model.h"
#include "runtime/location.h"

namespace torch_uvm::emulated {

/// One row per location: the host's has what belongs to no device. Not thread-safe: guarded by the runtime's mutex.
class CounterTable {
 public:
  explicit CounterTable(int devices) : rows_(static_cast<std::size_t>(devices) + 1) {}

  EmulatedCounters& of(Location location) {
    return rows_[static_cast<std::size_t>(location.index + 1)];
  }
  EmulatedCounters& of(int device) {
    return of(Location::device(device));
  }
  EmulatedCounters total() const {
    EmulatedCounters sum;
    for (const EmulatedCounters& row : rows_) {
#define TORCH_UVM_ADD(name) sum.name += row.name;
      TORCH_UVM_EMULATED_COUNTERS(TORCH_UVM_ADD)
#undef TORCH_UVM_ADD
    }
    return sum;
  }
  void reset() {
    rows_.assign(rows_.size(), {});
  }

 private:
  std::vector<EmulatedCounters> rows_; ///< the host's is the first
};

} // namespace torch_uvm::emulated
