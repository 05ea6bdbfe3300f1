// Functions in C of PyTorch whose behaviour is replaced. The function object stays the same: a program may have
// imported it before, and a tensor subclass compares it with the `func` that __torch_function__ receives.
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <utility>

#include "python/bindings.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

py::object checked(PyObject* created) {
  if (created == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(created);
}

/// What calls of a function in C read.
struct Slots {
  PyMethodDef*& definition;
  vectorcallfunc& vectorcall;
};

bool is_method(const py::object& function) {
  return Py_IS_TYPE(function.ptr(), &PyMethodDescr_Type);
}

Slots slots_of(const py::object& function) {
  if (is_method(function)) {
    auto* const method = reinterpret_cast<PyMethodDescrObject*>(function.ptr());
    return {method->d_method, method->vectorcall};
  }
  auto* const builtin = reinterpret_cast<PyCFunctionObject*>(function.ptr());
  return {builtin->m_ml, builtin->vectorcall};
}

/// Makes `function` call `definition`.
/// \param use called before, with a function that does what `function` did before; it must not be called yet
template <class Use>
void replace(const py::object& function, PyMethodDef& definition, Use&& use) {
  const py::object plain =
      checked(is_method(function) ? PyDescr_NewMethod(PyDescr_TYPE(function.ptr()), &definition)
                                  : PyCFunction_NewEx(&definition, PyCFunction_GET_SELF(function.ptr()), nullptr));
  use(plain);
  std::swap(slots_of(function).definition, slots_of(plain).definition);
  std::swap(slots_of(function).vectorcall, slots_of(plain).vectorcall);
}

// A definition has no place for data, so each function has a caller of its own. All is guarded by the GIL, and kept
// forever.

constexpr std::size_t kMaxFunctions = 16;
std::array<PyObject*, kMaxFunctions> replacements;
std::array<PyMethodDef, kMaxFunctions> definitions;
std::size_t functions = 0;

template <std::size_t index>
PyObject* call(PyObject* self, PyObject* args, PyObject* kwargs) {
  if (PyModule_Check(self)) { // not a method
    return PyObject_Call(replacements[index], args, kwargs);
  }
  PyObject* const method = PyMethod_New(replacements[index], self);
  PyObject* const result = method == nullptr ? nullptr : PyObject_Call(method, args, kwargs);
  Py_XDECREF(method);
  return result;
}

template <std::size_t... index>
constexpr auto callers_of(std::index_sequence<index...> /*unused*/) {
  return std::array<PyCFunctionWithKeywords, sizeof...(index)>{&call<index>...};
}
constexpr auto callers = callers_of(std::make_index_sequence<kMaxFunctions>());

void replace_function(const py::object& function, const py::object& wrap) {
  PyMethodDef* const before = slots_of(function).definition;
  if (before >= definitions.data() && before < definitions.data() + functions) {
    return; // replaced already
  }
  const std::size_t index = functions;
  PyMethodDef& definition = definitions.at(index);
  definition = *before;
  definition.ml_flags = METH_VARARGS | METH_KEYWORDS;
  definition.ml_meth = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(callers.at(index)));
  replace(function, definition, [&](const py::object& plain) {
    replacements.at(index) = wrap(plain).release().ptr();
    functions = index + 1;
  });
}

// Tensor.data_ptr under a budget. Launchers of kernels call it for each pointer, so it is not in Python.

PyObject* plain_data_ptr = nullptr;
PyObject* materialising_data_ptr = nullptr;

/// Whether addresses stay what they are without being materialised: no operator is watched, or this thread runs a
/// compiled graph, whose inputs are pinned and whose writes are known.
bool addresses_stay() {
  if (const Engine::Frame* const running = this_thread().running; running != nullptr && running->region) {
    return true;
  }
  const Engine* const engine = engine_in_use();
  return !may_need_updates() && (engine == nullptr || !(engine->is_awake() || engine->has_open_captures()));
}

PyObject* data_ptr(PyObject* self, PyObject* /*unused*/) {
  return PyObject_CallOneArg(addresses_stay() ? plain_data_ptr : materialising_data_ptr, self);
}

PyMethodDef data_ptr_definition{"data_ptr", &data_ptr, METH_NOARGS,
                                "The address of the first element. Under a budget it is good until the next operator."};

void replace_data_ptr(const py::object& method, const py::object& wrap) {
  if (slots_of(method).definition == &data_ptr_definition) {
    return;
  }
  replace(method, data_ptr_definition, [&](const py::object& plain) {
    plain_data_ptr = plain.inc_ref().ptr();
    materialising_data_ptr = wrap(plain).release().ptr();
  });
}

} // namespace

void bind_replaced_functions(py::module_& module) {
  module.def("replace_function", &replace_function, py::arg("function"), py::arg("wrap"), keeps_gil);
  module.def("replace_data_ptr", &replace_data_ptr, py::arg("method"), py::arg("wrap"), keeps_gil);
}

} // namespace torch_uvm
