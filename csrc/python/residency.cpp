// Bindings of budgets and of the residency engine: budgets.h and process_engine.h of csrc/tensor/process,
// csrc/tensor/dispatch/pins.h.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/operand_walk.h"
#include "tensor/dispatch/pins.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/budget_state.h"
#include "tensor/process/budgets.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

py::dict traffic_dict(const ResidencyStatistics::Traffic& traffic) {
  py::dict dict;
  dict["count"] = traffic.count;
  dict["bytes"] = traffic.bytes;
  dict["ms"] = traffic.ms;
  return dict;
}

/// Pins or unpins tensors: all, or none if it throws.
void keep_all(const std::vector<at::Tensor>& tensors, bool keep) {
  std::size_t kept = 0;
  try {
    for (; kept < tensors.size(); ++kept) {
      keep_resident(tensors[kept], keep);
    }
  } catch (...) {
    for (std::size_t each = 0; keep && each < kept; ++each) {
      keep_resident(tensors[each], false);
    }
    throw;
  }
}

/// Pins tensors until it ends or is destroyed, so that a Ctrl-C at any moment leaves no pin.
class Pins {
 public:
  explicit Pins(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
    keep_all(tensors_, true);
  }
  ~Pins() {
    try {
      end();
    } catch (...) {
      // They stay pinned until they are freed.
    }
  }
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;

  void end() {
    keep_all(std::exchange(tensors_, {}), false);
  }

 private:
  std::vector<at::Tensor> tensors_;
};

/// Calls a method of the engine, if there is one. \return its result, or a value-initialised one
template <auto method>
auto of_engine() {
  Engine* const engine = engine_in_use();
  using Result = decltype((engine->*method)());
  return engine == nullptr ? Result() : (engine->*method)();
}

py::dict residency_stats() {
  const ResidencyStatistics now = without_gil(&of_engine<&Engine::statistics>);
  py::dict dict;
  dict["fetched"] = traffic_dict(now.fetched);
  dict["written_back"] = traffic_dict(now.written_back);
  dict["dropped_clean"] = traffic_dict(now.dropped_clean);
  dict["used_in_place"] = traffic_dict(now.used_in_place);
  dict["waited"] = traffic_dict(now.waited);
  dict["moved"] = traffic_dict(now.moved);
  dict["made_room"] = traffic_dict(now.made_room);
  dict["plan_hits"] = now.plan_hits;
  dict["plan_misses"] = now.plan_misses;
  dict["over_budget"] = now.over_budget;
  dict["device_bytes"] = now.device_bytes;
  dict["peak_device_bytes"] = now.peak_device_bytes;
  dict["host_bytes"] = now.host_bytes;
  dict["records"] = now.records;
  dict["failures"] = now.failures;
  return dict;
}

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
          if (Engine* const engine = engine_in_use()) {
            engine->note_between_operators();
          }
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

void bind_residency(py::module_& module) {
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
  module.def("host_limit_in_force", &host_limit_in_force, no_gil);
  module.def("knows_all", &knows_all, no_gil);
  module.def(
      "make_all_known",
      [] {
        std::vector<c10::Storage> storages; // torch.utils.swap_tensors refuses tensors that have another owner
        {
          // Gone before the GIL is released: PyTorch can only fill a tuple, on another thread, that has one reference.
          const py::list objects = py::module_::import("gc").attr("get_objects")();
          for (const py::handle object : objects) {
            if (PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0) {
              if (const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
                  accelerators_storage(tensor) != nullptr) {
                storages.push_back(tensor.storage());
              }
            }
          }
        }
        without_gil([&] {
          make_known(storages);
          storages.clear();
        });
      },
      no_gil_inside);
  module.def(
      "materialise_storage", [](const c10::Storage& storage) { materialise(over(storage)); }, py::arg("storage"),
      no_gil);
  module.def(
      "flush_pending_of_storage", [](const c10::Storage& storage) { run_deferred_updates_of({over(storage)}); },
      py::arg("storage"), no_gil);
  module.def("budget", &budget_in_force, py::arg("device"), no_gil);
  module.def("residency_stats", &residency_stats, no_gil_inside);
  module.def(
      "is_settled",
      [] {
        Engine* const engine = engine_in_use();
        return engine == nullptr || engine->is_settled(this_thread().now());
      },
      no_gil);
  module.def("reset_residency_stats", &of_engine<&Engine::reset_statistics>, no_gil);
  module.def("keep_resident", &keep_all, py::arg("tensors"), py::arg("keep"), no_gil);
  py::class_<Pins>(module, "Pins", py::release_gil_before_calling_cpp_dtor())
      .def(py::init<std::vector<at::Tensor>>(), py::arg("tensors"), no_gil)
      .def("end", &Pins::end, no_gil);
  module.def("materialise", &materialise, py::arg("tensor"), no_gil);
  module.def(
      "mark_step",
      [] {
        if (Engine* const engine = engine_in_use()) {
          engine->mark_step(this_thread().now());
        }
      },
      no_gil);
  module.def(
      "start_recording_accesses",
      [](const std::string& path) {
        Engine* const engine = engine_in_use();
        if (engine == nullptr) {
          throw InvalidArgument("accesses are seen on devices with a budget only; set one before recording");
        }
        engine->start_recording(path);
      },
      py::arg("path"), no_gil);
  module.def("stop_recording_accesses", &of_engine<&Engine::stop_recording>, no_gil);
}

} // namespace torch_uvm
