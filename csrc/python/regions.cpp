// Bindings of csrc/tensor/dispatch/regions.h and captures.h: calls of compiled graphs, and CUDA graph captures.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <set>

#include "python/bindings.h"
#include "tensor/dispatch/captures.h"
#include "tensor/dispatch/regions.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

/// nullptr if the object has no storage that the engine could move.
c10::StorageImpl* storage_of(py::handle object) {
  if (!THPVariable_Check(object.ptr())) {
    return nullptr;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object.ptr());
  const bool may_be_managed =
      tensor.defined() && tensor.has_storage() && !tensor.device().is_cpu() && !tensor.device().is_meta();
  return may_be_managed ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

std::unique_ptr<Region> enter_region(std::uint64_t key, const py::sequence& inputs, const py::sequence& constants,
                                     const std::optional<std::set<std::size_t>>& written, const py::object& unwritten) {
  Engine* const engine = engine_in_use();
  if (engine == nullptr) {
    return nullptr;
  }
  std::vector<Region::Input> storages;
  std::size_t index = 0;
  for (const py::handle input : inputs) {
    if (c10::StorageImpl* const storage = storage_of(input)) {
      const bool writes =
          !written || written->contains(index) || (!unwritten.is_none() && !py::isinstance(input, unwritten));
      storages.push_back({storage, writes});
    }
    ++index;
  }
  for (const py::handle constant : constants) {
    if (c10::StorageImpl* const storage = storage_of(constant)) {
      storages.push_back({storage, false});
    }
  }
  return without_gil([&] { return Region::enter(key, storages); });
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
  module.def("enter_region", &enter_region, py::arg("key"), py::arg("inputs"), py::arg("constants"), py::arg("written"),
             py::arg("unwritten"), no_gil_inside);
  module.def("leave_region", &leave_region, py::arg("region"), py::arg("outputs"), no_gil_inside);
  module.def("begin_capture", &begin_capture, no_gil);
  module.def("end_capture", &end_capture, py::arg("capture"), no_gil);
  module.def("note_replay", &note_replay, py::arg("capture"), no_gil);
  module.def("release_capture", &release_capture, py::arg("capture"), no_gil);
}

} // namespace torch_uvm
