// Bindings of csrc/tensor/deferred_updates.h: updates of parameters that wait for the parameters' next use.
#include <ATen/record_function.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"
#include "tensor/deferrable.h"
#include "tensor/deferred_updates.h"
#include "tensor/watcher.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

void add(DeferredUpdate& update, const std::string& name, const std::string& overload, const py::tuple& args,
         const py::dict& kwargs, const std::vector<at::Tensor>& results) {
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(true); // as autograd hands operands on to Python
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
  update.add(op,
             torch::jit::createStackForSchema(op.schema(), torch::jit::tuple_slice(args),
                                              py::reinterpret_borrow<py::kwargs>(kwargs), std::nullopt),
             results);
}

/// What Python makes an update from.
struct Recorded {
  explicit Recorded(c10::Device device) : update(std::make_unique<DeferredUpdate>(device)) {}
  std::unique_ptr<DeferredUpdate> update;
};

} // namespace

void bind_deferred(py::module_& module) {
  const py::call_guard<py::gil_scoped_release> no_gil; // all of these may run operators
  py::class_<Recorded>(module, "DeferredUpdate")
      .def(py::init<c10::Device>(), py::arg("device"))
      .def(
          "add",
          [](Recorded& self, const std::string& name, const std::string& overload, const py::tuple& args,
             const py::dict& kwargs,
             const std::vector<at::Tensor>& results) { add(*self.update, name, overload, args, kwargs, results); },
          py::arg("name"), py::arg("overload"), py::arg("args"), py::arg("kwargs"), py::arg("results"));
  module.def(
      "observe_operators",
      [](bool on) {
        const bool before = at::isRecordFunctionEnabled();
        at::enableRecordFunction(on);
        return before;
      },
      py::arg("on"));
  module.def("deferrable", &deferrable, py::arg("operands"), no_gil);
  module.def(
      "defer",
      [](const std::vector<Recorded*>& recorded) {
        std::vector<std::unique_ptr<DeferredUpdate>> updates;
        for (Recorded* const each : recorded) {
          each->update->seal(); // what it stands on in Python goes here, with the GIL
          updates.push_back(std::move(each->update)); // the Python object is of no use afterwards
        }
        const py::gil_scoped_release released;
        defer(std::move(updates));
        watch_operators(); // a budget may have been taken away meanwhile
      },
      py::arg("updates"));
  module.def(
      "flush_pending",
      [](const std::vector<at::Tensor>& tensors) {
        for (const at::Tensor& tensor : tensors) {
          run_deferred_updates_of(tensor);
        }
        wait_for_deferred_updates(std::vector<c10::IValue>(tensors.begin(), tensors.end()));
      },
      py::arg("tensors"), no_gil);
  module.def("flush_all_pending", &run_deferred_updates, no_gil);
  module.def("pending_updates", &deferred_updates);
}

} // namespace torch_uvm
