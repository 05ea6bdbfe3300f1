// What hints need to know of the runtime's devices, asked once.
#pragma once

#include <cstddef>
#include <vector>

namespace torch_uvm {

struct Machine {
  std::size_t page_bytes = 0; ///< the largest granularity of migration of any device
  std::vector<bool> concurrent; ///< by device: host and device may touch managed memory at the same time

  /// Makes the runtime, if there is none yet; a runtime does not change.
  static const Machine& get();

  /// Whether managed memory of a device takes hints: not where the device cannot touch it while the host
  /// does, which is warned of once, and not in a forked child.
  bool takes_hints(int device) const;
  bool takes_hints() const; ///< of every device
  /// Those whose work, on whatever memory, keeps the host from touching managed memory.
  std::vector<int> exclusive_devices() const;

  /// For tests: as if no device could touch managed memory while the host does.
  static void pretend_not_concurrent(bool pretend);
};

} // namespace torch_uvm
