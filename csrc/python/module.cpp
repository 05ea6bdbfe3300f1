// The extension module torch_uvm._C, and how it raises the errors of C++.
#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "python/bindings.h"
#include "runtime/error.h"
#include "tensor/dispatch/watcher.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

/// torch.OutOfMemoryError. The reference is leaked, because exceptions may be raised while the interpreter shuts down.
py::object& out_of_memory_error() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
  return storage
      .call_once_and_store_result([] { return py::object(py::module_::import("torch").attr("OutOfMemoryError")); })
      .get_stored();
}

/// Translates the errors of runtime/error.h to Python exceptions.
void translate(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const OutOfMemory& error) {
    py::set_error(out_of_memory_error(), error.what());
  } catch (const InvalidArgument& error) {
    py::set_error(PyExc_ValueError, error.what());
  } catch (const RuntimeFailure& error) {
    py::set_error(PyExc_RuntimeError, error.what());
  }
}

} // namespace
} // namespace torch_uvm

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.doc() = "The C++ layers of torch_uvm.";
  torch_uvm::register_watcher();
  torch_uvm::out_of_memory_error(); // imported now, so that translating an error never imports
  pybind11::register_local_exception_translator(torch_uvm::translate); // local: other modules are not affected
  torch_uvm::bind_allocators(module);
  torch_uvm::bind_tensor(module);
  torch_uvm::bind_residency(module);
  torch_uvm::bind_replaced_functions(module);
  torch_uvm::bind_schedules(module);
  torch_uvm::bind_allocation_sites(module);
  torch_uvm::bind_deferred(module);
  torch_uvm::bind_regions(module);
  torch_uvm::bind_exchange(module);
  torch_uvm::bind_emulated(module);
  if (torch_uvm::bind_test_bindings != nullptr) {
    torch_uvm::bind_test_bindings(module);
  }
}
