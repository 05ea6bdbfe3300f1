// Deliberate faults that prove a sanitizer is active: `_C.planted_race()` and `_C.planted_use_after_free()`, in builds
// with TORCH_UVM_SANITIZED only. If neither is reported, the extension is not instrumented.
#include "python/bindings.h"

#ifdef TORCH_UVM_SANITIZED

#include <atomic>
#include <memory>
#include <thread>

namespace torch_uvm {
namespace {

/// A data race: two threads write a variable without synchronisation.
int planted_race() {
  int written = 0;
  std::atomic<int> ready{0};
  const auto write = [&] {
    ready.fetch_add(1, std::memory_order_relaxed); // relaxed, so that it does not order the writes
    while (ready.load(std::memory_order_relaxed) != 2) {
      std::this_thread::yield();
    }
    ++written;
  };
  std::thread other(write);
  write();
  other.join();
  return written;
}

int planted_use_after_free() {
  auto owned = std::make_unique<int>(1);
  volatile const int* const freed = owned.get();
  owned.reset();
  return *freed;
}

} // namespace

void bind_planted_faults(pybind11::module_& module) {
  module.def("planted_race", &planted_race, "A data race, for ThreadSanitizer to find.", no_gil);
  module.def("planted_use_after_free", &planted_use_after_free, "A use after free, for AddressSanitizer to find.",
             no_gil);
}

} // namespace torch_uvm

#else

namespace torch_uvm {

void bind_planted_faults(pybind11::module_& /*module*/) {}

} // namespace torch_uvm

#endif
