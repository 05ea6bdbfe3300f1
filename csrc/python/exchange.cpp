// Bindings of csrc/tensor/moves/dlpack.h: export and import of DLPack capsules.
#include <ATen/DLConvertor.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "python/bindings.h"
#include "tensor/moves/dlpack.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

/// The tensor in an unconsumed DLPack capsule; nullptr for any other object.
template <class T>
T* held_by(PyObject* capsule) {
  using Names = at::DLPackTraits<T>;
  return PyCapsule_IsValid(capsule, Names::capsule) != 0
             ? static_cast<T*>(PyCapsule_GetPointer(capsule, Names::capsule))
             : nullptr;
}

template <class T>
void delete_capsule(PyObject* capsule) {
  if (T* held = held_by<T>(capsule); held != nullptr && held->deleter != nullptr) {
    without_gil([held] { held->deleter(held); }); // our deleter unpins the tensor and may free it
  }
}

template <class T>
py::object export_capsule(const at::Tensor& tensor, std::int32_t device_id, bool copied) {
  T* given = without_gil([&] { return export_managed<T>(tensor, device_id, copied); }); // may wait for a fetch
  PyObject* capsule = PyCapsule_New(given, at::DLPackTraits<T>::capsule, &delete_capsule<T>);
  if (capsule == nullptr) {
    without_gil([given] { given->deleter(given); });
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

template <class T>
at::Tensor import_capsule(PyObject* capsule, T* held, c10::Device device, bool read_only_too) {
  // Marked as consumed before the GIL is released, so that another thread cannot consume it too. From here on the
  // capsule's destructor does nothing.
  PyCapsule_SetName(capsule, at::DLPackTraits<T>::used);
  try {
    // With the label "cpu" this waits for the device.
    return without_gil([&] { return import_managed<T>(held, device, read_only_too); });
  } catch (...) {
    PyCapsule_SetName(capsule, at::DLPackTraits<T>::capsule);
    throw;
  }
}

/// Calls `use` with the tensor in an unconsumed capsule. \throws py::type_error or py::buffer_error for other objects
template <class Use>
auto with_capsule(const py::object& capsule, Use use) {
  if (auto* held = held_by<DLManagedTensorVersioned>(capsule.ptr())) {
    return use(held);
  }
  if (auto* held = held_by<DLManagedTensor>(capsule.ptr())) {
    return use(held);
  }
  if (PyCapsule_CheckExact(capsule.ptr()) == 0) {
    throw py::type_error("no DLPack capsule: " + py::repr(capsule).cast<std::string>());
  }
  const char* name = PyCapsule_GetName(capsule.ptr());
  const std::string named = name == nullptr ? "no name" : "the name '" + std::string(name) + "'";
  throw py::buffer_error("a capsule with " + named + "; accepted: 'dltensor' and 'dltensor_versioned', " +
                         (named.find("used_") == std::string::npos ? "DLPack's" : "and this one has been consumed"));
}

} // namespace

void bind_exchange(py::module_& module) {
  register_resize_check();
  module.def("label_count", &label_count, py::arg("storage"), no_gil);
  module.def(
      "dlpack_device",
      [](const py::object& capsule) {
        return with_capsule(capsule, [](auto* held) {
          const DLDevice device = held->dl_tensor.device;
          return std::pair(static_cast<int>(device.device_type), static_cast<int>(device.device_id));
        });
      },
      py::arg("capsule"), keeps_gil);
  module.def(
      "dlpack_export",
      [](const at::Tensor& tensor, std::int32_t device_id, bool versioned, bool copied) {
        return versioned ? export_capsule<DLManagedTensorVersioned>(tensor, device_id, copied)
                         : export_capsule<DLManagedTensor>(tensor, device_id, copied);
      },
      py::arg("tensor"), py::arg("device_id"), py::arg("versioned"), py::arg("copied"), no_gil_inside);
  module.def(
      "dlpack_import",
      [](const py::object& capsule, const c10::Device& device, bool read_only_too) {
        return with_capsule(capsule,
                            [&](auto* held) { return import_capsule(capsule.ptr(), held, device, read_only_too); });
      },
      py::arg("capsule"), py::arg("device"), py::arg("read_only_too"), no_gil_inside);
}

} // namespace torch_uvm
