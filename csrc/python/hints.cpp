// Bindings of csrc/tensor/hints/hints.h and owned_bytes.h. The hints themselves are registered as operators.
#include "python/bindings.h"

#include <torch/csrc/utils/pybind.h>

#include "tensor/hints/hints.h"
#include "tensor/hints/owned_bytes.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

using Pairs = std::vector<std::pair<std::uintptr_t, std::size_t>>;

Pairs pairs(const Ranges& ranges) {
  Pairs made;
  for (const Range& range : ranges) {
    made.emplace_back(range.begin, range.bytes());
  }
  return made;
}

py::object place(const std::optional<Location>& location) {
  return location ? py::object(py::int_(location->index)) : py::none();
}

py::dict attributes_dict(std::uintptr_t address, std::size_t bytes) {
  const RangeAttributes attributes = without_gil(
      [&] { return Context::get().runtime().range_attributes(reinterpret_cast<const void*>(address), bytes); });
  std::vector<int> accessed_by;
  for (const Location location : attributes.accessed_by) {
    accessed_by.push_back(location.index);
  }
  py::dict dict;
  dict["uniform"] = attributes.uniform;
  dict["read_mostly"] = attributes.read_mostly;
  dict["preferred_location"] = place(attributes.preferred_location);
  dict["accessed_by"] = accessed_by;
  dict["last_prefetch"] = place(attributes.last_prefetch);
  return dict;
}

/// The block's address, bytes and home; nullopt for a tensor that is not managed.
std::optional<std::tuple<std::uintptr_t, std::size_t, int>> block_values(const at::Tensor& tensor) {
  Block* const block = is_managed(data_of(tensor.storage())) ? block_of(data_of(tensor.storage())) : nullptr;
  if (block == nullptr) {
    return std::nullopt;
  }
  const CachingManagedAllocator& allocator = Context::get().managed_allocator();
  return std::tuple(reinterpret_cast<std::uintptr_t>(allocator.data(block)), allocator.bytes(block),
                    allocator.home(block).index);
}

} // namespace

void bind_hints(py::module_& module) {
  register_hints();
  module.def("has_bytes", &has_bytes, py::arg("tensor"), keeps_gil);
  module.def(
      "residency",
      [](const std::vector<at::Tensor>& tensors) {
        const auto places = without_gil([&] { return residency(tensors); });
        py::dict dict;
        for (const auto& [device, bytes] : places) {
          dict[py::cast(device)] = bytes;
        }
        return dict;
      },
      py::arg("tensors"), no_gil_inside);

  // For tests: the ranges that hints apply to, as (address, bytes).
  module.def(
      "byte_runs", [](const at::Tensor& tensor, std::size_t gap) { return pairs(runs_of(tensor, gap)); },
      py::arg("tensor"), py::arg("gap") = 0, keeps_gil);
  module.def(
      "page_ranges",
      [](const std::vector<at::Tensor>& tensors, std::size_t page, std::size_t gap) {
        return pairs(page_ranges(owned_bytes(tensors, gap), page));
      },
      py::arg("tensors"), py::arg("page"), py::arg("gap") = 0, no_gil);
  module.def("range_attributes", &attributes_dict, py::arg("address"), py::arg("bytes"), no_gil_inside);
  module.def("block_of", &block_values, py::arg("tensor"), no_gil);
  module.def("pretend_not_concurrent", &Machine::pretend_not_concurrent, py::arg("pretend"), no_gil);
}

} // namespace torch_uvm
