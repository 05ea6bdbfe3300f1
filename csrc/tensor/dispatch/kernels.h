// Host kernels of the emulated accelerator, and the storages whose addresses they read.
#pragma once

#include <c10/core/StorageImpl.h>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// RAII object of a host kernel that reads storage addresses. If the engine is awake at construction, `use` pins
/// storages that the thread's operator does not pin already. Else the kernel counts as running for the object's
/// lifetime.
class Kernel {
 public:
  Kernel();
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// Call before reading the storage's address.
  void use(c10::StorageImpl* storage, bool writes);

 private:
  Engine::Frame frame_;
  const bool counted_;
  const bool holds_;
};

} // namespace torch_uvm
