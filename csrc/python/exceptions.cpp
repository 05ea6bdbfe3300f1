// Translates the C++ errors of runtime/error.h to Python exceptions.
#include <pybind11/gil_safe_call_once.h>

#include <exception>

#include "python/bindings.h"
#include "runtime/error.h"

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

void register_exceptions(pybind11::module_& /*module*/) {
  // Imported now, so that translating an error never imports.
  out_of_memory_error();
  // Local to this extension, so that it does not affect other pybind11 modules.
  py::register_local_exception_translator(translate);
}

} // namespace torch_uvm
