// The extension module torch_uvm._C.
#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"
#include "tensor/dispatch/watcher.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ layers of torch_uvm.";
  torch_uvm::register_watcher();
  torch_uvm::register_exceptions(module);
  torch_uvm::bind_allocators(module);
  torch_uvm::bind_tensor(module);
  torch_uvm::bind_hints(module);
  torch_uvm::bind_budgets(module);
  torch_uvm::bind_residency(module);
  torch_uvm::bind_replaced_functions(module);
  torch_uvm::bind_schedules(module);
  torch_uvm::bind_allocation_sites(module);
  torch_uvm::bind_deferred(module);
  torch_uvm::bind_regions(module);
  torch_uvm::bind_exchange(module);
  torch_uvm::bind_replay(module);
  torch_uvm::bind_emulated(module);
  if (torch_uvm::bind_test_bindings != nullptr) {
    torch_uvm::bind_test_bindings(module);
  }
}
