// Bindings of csrc/tensor/dispatch/regions.h and captures.h: calls of compiled graphs, and CUDA graph captures.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "tensor/dispatch/captures.h"
#include "tensor/dispatch/deferred_updates.h"
#include "tensor/dispatch/operand_walk.h"
#include "tensor/dispatch/regions.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

/// nullptr if the object has no storage that the engine could move.
c10::StorageImpl* storage_of(py::handle object) {
  return THPVariable_Check(object.ptr()) ? accelerators_storage(THPVariable_Unpack(object.ptr())) : nullptr;
}

/// Runs the updates that the inputs wait for.
void update(const py::sequence& inputs) {
  std::vector<at::Tensor> tensors;
  for (const py::handle input : inputs) {
    if (THPVariable_Check(input.ptr())) {
      tensors.push_back(THPVariable_Unpack(input.ptr()));
    }
  }
  without_gil([&] {
    run_deferred_updates_of(tensors);
    wait_for_deferred_updates(std::vector<c10::IValue>(tensors.begin(), tensors.end()));
  });
}

/// What is known of code whose kernels are not observed: a compiled graph, a Triton kernel, a declared use.
class Unobserved {
 public:
  Unobserved(std::string name, const py::sequence& constants, const std::optional<std::set<std::size_t>>& written,
             py::object unwritten)
      : name(std::move(name)), constants_(constants), writes_all_(!written), unwritten_(std::move(unwritten)) {
    static std::uint64_t made = 0; // guarded by the GIL
    key = ++made;
    for (const std::size_t index : written.value_or(std::set<std::size_t>())) {
      written_.resize(std::max(written_.size(), index + 1));
      written_[index] = true;
    }
  }

  /// What a call with these inputs uses.
  std::vector<Region::Input> storages(const py::sequence& inputs) const {
    std::vector<Region::Input> found;
    found.reserve(inputs.size() + constants_.size());
    std::size_t index = 0;
    for (const py::handle input : inputs) {
      if (c10::StorageImpl* const storage = storage_of(input)) {
        found.push_back({storage, writes(index, input)});
      }
      ++index;
    }
    for (const py::handle constant : constants_) {
      if (c10::StorageImpl* const storage = storage_of(constant)) {
        found.push_back({storage, false});
      }
    }
    return found;
  }

  std::uint64_t key = 0; ///< identifies it to the policy
  std::string name;

 private:
  bool writes(std::size_t index, py::handle input) const {
    if (writes_all_ || (index < written_.size() && written_[index])) {
      return true;
    }
    // By the type's bases, and not by isinstance: Parameter's metaclass has a check of its own, in Python.
    return !unwritten_.is_none() &&
           PyType_IsSubtype(Py_TYPE(input.ptr()), reinterpret_cast<PyTypeObject*>(unwritten_.ptr())) == 0;
  }

  py::tuple constants_;
  std::vector<bool> written_; ///< by input
  bool writes_all_;
  py::object unwritten_;
};

/// Runs the updates that the inputs wait for. \return the engine; nullptr if none needs to know of their use
Engine* begin_use(const py::sequence& inputs) {
  if (may_need_updates()) {
    update(inputs);
  }
  return engine_in_use();
}

/// Begins a call. While no operator is watched, its inputs are not looked at.
std::unique_ptr<Region> enter_region(const Unobserved& graph, const py::sequence& inputs) {
  Engine* const engine = begin_use(inputs);
  if (engine == nullptr) {
    return nullptr;
  }
  if (std::unique_ptr<Region> region = Region::enter_unwatched(*engine)) {
    return region;
  }
  const std::vector<Region::Input> storages = graph.storages(inputs);
  return without_gil([&] { return Region::enter(*engine, graph.key, graph.name.c_str(), storages); });
}

/// Code whose uses are declared, from here until `leave_use`, on any thread.
std::unique_ptr<WorkUnderWay> use(const Unobserved& code, const py::sequence& inputs) {
  Engine* const engine = begin_use(inputs);
  if (engine == nullptr) {
    return nullptr;
  }
  const std::vector<Region::Input> storages = code.storages(inputs);
  return without_gil([&] { return std::make_unique<WorkUnderWay>(*engine, code.key, code.name.c_str(), storages); });
}

void leave_region(Region& region, const py::object& outputs) {
  std::vector<c10::StorageImpl*> storages;
  if (py::isinstance<py::sequence>(outputs)) {
    for (const py::handle output : py::reinterpret_borrow<py::sequence>(outputs)) {
      if (c10::StorageImpl* const storage = storage_of(output)) {
        storages.push_back(storage);
      }
    }
  } else if (c10::StorageImpl* const storage = storage_of(outputs)) {
    storages.push_back(storage);
  }
  without_gil([&] { region.leave(storages); });
}

} // namespace

void bind_regions(py::module_& module) {
  py::class_<Region>(module, "Region", py::release_gil_before_calling_cpp_dtor()); // its destructor releases the inputs
  py::class_<Unobserved>(module, "Unobserved")
      .def(py::init<std::string, const py::sequence&, const std::optional<std::set<std::size_t>>&, py::object>(),
           py::arg("name"), py::arg("constants"), py::arg("written"), py::arg("unwritten"), keeps_gil)
      .def("enter", &enter_region, py::arg("inputs"), no_gil_inside)
      .def("use", &use, py::arg("inputs"), no_gil_inside);
  py::class_<WorkUnderWay>(module, "DeclaredUse", py::release_gil_before_calling_cpp_dtor());
  module.def("leave_use", &WorkUnderWay::end, py::arg("use"), no_gil);
  module.def("leave_region", &leave_region, py::arg("region"), py::arg("outputs"), no_gil_inside);
  module.def("begin_capture", &begin_capture, no_gil);
  module.def("end_capture", &end_engine_capture, py::arg("capture"), no_gil);
  module.def("note_launch", &note_launch, py::arg("capture"), no_gil);
  module.def("release_capture", &release_capture, py::arg("capture"), no_gil);
}

} // namespace torch_uvm
