// The errors of the floors below torch, as Python exceptions.
#include <pybind11/gil_safe_call_once.h>

#include <exception>

#include "python/bindings.h"
#include "runtime/error.h"

namespace torch_uvm {

namespace {

namespace py = pybind11;

/// torch.OutOfMemoryError. Kept for good (the storage is leaked on purpose): exceptions may be raised
/// while the interpreter is shutting down.
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
  // Looked up now: translating an error must not have to import anything.
  out_of_memory_error();
  // Local to this extension: other pybind11 modules keep their own translation.
  py::register_local_exception_translator(translate);
}

} // namespace torch_uvm
