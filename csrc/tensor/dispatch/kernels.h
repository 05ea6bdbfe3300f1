// Kernels on the host, and the storages that they read addresses of.
#pragma once

#include <c10/core/StorageImpl.h>

#include "residency/engine/engine.h"

namespace torch_uvm {

/// A kernel on the host that reads addresses of storages. It is counted while it runs. If the engine is awake by now,
/// it holds the storages that its operator does not hold.
class Kernel {
 public:
  Kernel();
  ~Kernel();
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;

  /// Before an address of the storage is read.
  void use(c10::StorageImpl* storage, bool writes);

  /// All kernels have this object from now on, as those of the emulated accelerator do.
  static void count();

 private:
  Engine::Frame frame_;
  bool counted_ = false;
  bool holds_ = false;
};

} // namespace torch_uvm
