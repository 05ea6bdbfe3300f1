// Bindings of csrc/tensor/dispatch/deferred_updates.h: optimizer updates that run before the parameters' next use.
#include <ATen/record_function.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "python/bindings.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

/// An update that Python is recording.
struct Recorded {
  explicit Recorded(c10::Device device) : update(std::make_unique<DeferredUpdate>(device)) {}
  std::unique_ptr<DeferredUpdate> update;
};

c10::OperatorHandle operator_of(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

torch::jit::Stack stack_of(const c10::OperatorHandle& op, const py::tuple& args, const py::dict& kwargs) {
  const torch::jit::ToIValueAllowNumbersAsTensors numbers(true); // PyTorch passes such operands to Python as numbers
  return torch::jit::createStackForSchema(op.schema(), torch::jit::tuple_slice(args),
                                          py::reinterpret_borrow<py::kwargs>(kwargs), std::nullopt);
}

void add(Recorded& recorded, const std::string& name, const std::string& overload, const py::tuple& args,
         const py::dict& kwargs, const std::vector<at::Tensor>& results) {
  const c10::OperatorHandle op = operator_of(name, overload);
  recorded.update->add(op, stack_of(op, args, kwargs), results);
}

/// A list with some elements of this list; another value or an empty list as it is.
c10::IValue elements(const c10::IValue& value, std::size_t from, std::size_t to) {
  if (!value.isList() || value.toListRef().empty()) {
    return value;
  }
  c10::impl::GenericList some(value.toList().elementType());
  for (; from < to; ++from) {
    some.push_back(value.toListRef().at(from));
  }
  return some;
}

/// Records an operator that does the same with each element of its lists: in the update at the same index, once for
/// neighbours that have the same update. \throws c10::Error: a list is shorter than `recorded`, or
/// `results` is of another length
void add_each(const std::vector<Recorded*>& recorded, const std::string& name, const std::string& overload,
              const py::tuple& args, const py::dict& kwargs, const std::vector<at::Tensor>& results) {
  const c10::OperatorHandle op = operator_of(name, overload);
  const torch::jit::Stack all = stack_of(op, args, kwargs);
  TORCH_CHECK(results.empty() || results.size() == recorded.size(), op.operator_name(), " has ", results.size(),
              " results, for ", recorded.size());
  for (std::size_t from = 0, to = 0; from < recorded.size(); from = to) {
    while (to < recorded.size() && recorded[to] == recorded[from]) {
      ++to;
    }
    torch::jit::Stack inputs;
    for (const c10::IValue& value : all) {
      inputs.push_back(elements(value, from, to));
    }
    const auto begin = results.begin();
    recorded[from]->update->add(op, std::move(inputs),
                                results.empty() ? results
                                                : std::vector<at::Tensor>(begin + static_cast<std::ptrdiff_t>(from),
                                                                          begin + static_cast<std::ptrdiff_t>(to)));
  }
}

// A KeyboardInterrupt may come between any two calls from Python. So each of these functions is one call: it happens
// completely or not at all.

/// Sends this thread's operators to `mode`, a TorchDispatchMode, and disables RecordFunction: the operators do not run
/// yet.
void begin_recording(const py::object& mode) {
  mode.attr("observed") = at::isRecordFunctionEnabled();
  py::module_::import("torch._C").attr("_push_on_torch_dispatch_stack")(mode);
  at::enableRecordFunction(false);
}

/// Calls an operator that runs at once while `mode` records. The engine must see what it uses.
py::object call_observed(const py::object& mode, const py::object& op, const py::args& args, const py::kwargs& kwargs) {
  const at::RecordFunctionGuard observed(mode.attr("observed").cast<bool>());
  return op(*args, **kwargs);
}

/// Undoes `begin_recording`, if it was called.
void end_recording(const py::object& mode) {
  const py::module_ torch = py::module_::import("torch._C");
  const auto modes = torch.attr("_len_torch_dispatch_stack")().cast<int>();
  if (modes > 0 && torch.attr("_get_dispatch_stack_at")(modes - 1).is(mode)) {
    torch.attr("_pop_torch_dispatch_stack")(py::none());
    at::enableRecordFunction(mode.attr("observed").cast<bool>());
  }
}

} // namespace

void bind_deferred(py::module_& module) {
  py::class_<Recorded>(module, "DeferredUpdate", py::release_gil_before_calling_cpp_dtor()) // may free tensors
      .def(py::init<c10::Device>(), py::arg("device"), no_gil)
      .def("add", &add, py::arg("name"), py::arg("overload"), py::arg("args"), py::arg("kwargs"), py::arg("results"),
           keeps_gil);
  module.def("add_each", &add_each, py::arg("updates"), py::arg("name"), py::arg("overload"), py::arg("args"),
             py::arg("kwargs"), py::arg("results"), keeps_gil);
  module.def("begin_recording", &begin_recording, py::arg("mode"), keeps_gil);
  module.def("call_observed", &call_observed, py::arg("mode"), py::arg("op"), keeps_gil);
  module.def("end_recording", &end_recording, py::arg("mode"), keeps_gil);
  module.def("deferrable", &deferrable, py::arg("operands"), no_gil);
  module.def(
      "defer",
      [](const std::vector<Recorded*>& recorded) {
        std::vector<std::unique_ptr<DeferredUpdate>> updates;
        for (Recorded* const each : recorded) {
          each->update->seal(); // releases its Python objects, which needs the GIL
          updates.push_back(std::move(each->update)); // the Python object is empty afterwards
        }
        without_gil([&] {
          defer_beside_operators(std::move(updates));
          watch_operators(); // a budget may have been removed meanwhile
        });
      },
      py::arg("updates"), no_gil_inside);
  module.def(
      "flush_pending",
      [](const std::vector<at::Tensor>& tensors) {
        run_deferred_updates_of(tensors);
        wait_for_deferred_updates(std::vector<c10::IValue>(tensors.begin(), tensors.end()));
      },
      py::arg("tensors"), no_gil);
  module.def("flush_all_pending", &run_deferred_updates, no_gil);
  module.def(
      "stop_deferring",
      [] {
        run_deferred_updates();
        if (Engine* const engine = engine_in_use()) {
          engine->stay_awake(false); // no use of a pending update is to be seen
        }
      },
      no_gil);
  module.def("pending_updates", &deferred_updates, keeps_gil);
}

} // namespace torch_uvm
