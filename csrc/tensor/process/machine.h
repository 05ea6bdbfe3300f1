// Device properties that hints, budgets and adoption need, queried once, and the devices as PyTorch names them.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <vector>

#include "runtime/location.h"

namespace torch_uvm {

struct Machine {
  std::size_t page_bytes = 0; ///< the largest migration granularity of any device
  std::vector<bool> concurrent; ///< by device: concurrentManagedAccess
  std::vector<bool> one_memory; ///< by device: DeviceProperties::one_memory
  bool adopts = true; ///< every device has one memory with the host, and addresses pageable memory

  /// Creates the runtime if there is none yet.
  static const Machine& get();

  /// Whether hints have an effect on a device. False without concurrentManagedAccess, which warns once, and in a forked
  /// child.
  bool takes_hints(int device) const;
  bool takes_hints() const; ///< whether they have on every device
  /// The devices without concurrentManagedAccess: while they run any work, the host must not touch managed memory.
  std::vector<int> exclusive_devices() const;

  /// For tests: pretends that no device has concurrentManagedAccess.
  static void pretend_not_concurrent(bool pretend);
};

/// The CPU, or a device of the accelerator.
c10::Device torch_device(Location location);

/// Validates `device` and completes its index.
/// \param what begins the error: "a move to"
/// \throws c10::ValueError for a device that is neither the CPU nor an existing accelerator device
c10::Device resolve_device(c10::Device device, const char* what);

} // namespace torch_uvm
