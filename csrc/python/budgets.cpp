// Bindings of csrc/tensor/process/budgets.h: requests for budgets.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "python/bindings.h"
#include "tensor/dispatch/pins.h"
#include "tensor/process/budget_state.h"
#include "tensor/process/budgets.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

/// Creates a tensor on the storage without calling an operator.
at::Tensor over(c10::Storage storage) {
  const c10::DispatchKeySet key(c10::computeDispatchKey(c10::kByte, c10::kStrided, storage.device()));
  return at::detail::make_tensor<c10::TensorImpl>(std::move(storage), key, caffe2::TypeMeta::Make<std::uint8_t>());
}

unsigned long main_thread = 0;

/// See register_interpreter. Other threads may run operators meanwhile, so it is only done while there are none that
/// Python knows. Those of a backward are idle then.
void call_on_main_thread() noexcept {
  if (PyThread_get_thread_ident() == main_thread) {
    const auto call = [](void*) {
      try {
        if (py::module_::import("threading").attr("active_count")().cast<int>() == 1) {
          const py::gil_scoped_release without_gil;
          engine_in_use()->note_between_operators();
        }
      } catch (const std::exception&) {
        // The interpreter is going away. Operators are counted instead.
      }
      return 0;
    };
    Py_AddPendingCall(call, nullptr); // may refuse, if many calls are pending: then operators are counted instead
  }
}

} // namespace

void bind_budgets(py::module_& module) {
  main_thread = py::module_::import("threading").attr("main_thread")().attr("ident").cast<unsigned long>();
  register_interpreter(&call_on_main_thread);
  module.def(
      "parse_budget", [](const std::string& text) { return show_budget(parse_budget(text)); }, py::arg("text"),
      keeps_gil);
  module.def(
      "request_budget",
      [](std::optional<int> device, const std::optional<std::string>& budget) {
        request_budget(device, budget ? std::optional(parse_budget(*budget)) : std::nullopt);
      },
      py::arg("device"), py::arg("budget"), no_gil);
  module.def("request_default_budget", &request_default_budget, no_gil);
  module.def(
      "requested_budget",
      [](int device) {
        const std::optional<BudgetRequest> request = requested_budget(device);
        return request ? std::optional(show_budget(*request)) : std::nullopt;
      },
      py::arg("device"), no_gil);
  module.def("budget_of", &budget_of, py::arg("device"), no_gil);
  module.def("budget_warning", &budget_warning, py::arg("device"), no_gil);
  module.def("fit_automatic_budget", &fit_automatic_budget, py::arg("device"), py::arg("wanted"), no_gil);
  module.def("host_limit_in_force", &host_limit_in_force, no_gil);
  module.def("knows_all", &knows_all, no_gil);
  module.def(
      "make_known",
      [](const py::list& objects) {
        std::vector<at::Tensor> tensors;
        for (const py::handle object : objects) {
          if (PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0) {
            tensors.push_back(THPVariable_Unpack(object.ptr()));
          }
        }
        without_gil([&] {
          make_known(tensors);
          tensors.clear();
        });
      },
      py::arg("objects"), no_gil_inside);
  module.def(
      "materialise_storage", [](const c10::Storage& storage) { materialise(over(storage)); }, py::arg("storage"),
      no_gil);
}

} // namespace torch_uvm
