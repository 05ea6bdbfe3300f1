// Bindings of csrc/tensor: the switch, the options, managed tensors, their statistics and residency. The hints
// themselves are registered as operators.
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "config/options.h"
#include "python/bindings.h"
#include "runtime/bytes.h"
#include "runtime/host_memory.h"
#include "tensor/hints/hints.h"
#include "tensor/moves/moves.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/switch.h"
#include "tensor/storage/host_tensors.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"
#ifdef TORCH_UVM_WITH_CUDA
#include "cuda/cuda_backend.h"
#endif

namespace torch_uvm {
namespace {

namespace py = pybind11;

/// Converts a home from Python: None is all homes.
std::optional<Location> home_of(const std::optional<c10::Device>& device) {
  return device ? std::optional(location_of(*device)) : std::nullopt;
}

/// Initialises PyTorch's device. PyTorch does this lazily in its own Python functions, but not in operators. With the
/// CUDA backend, managed memory labelled "cpu" needs CUDA too, except in a forked process, where it is ordinary memory.
void start_device(const c10::Device& device) {
  const bool cuda = Context::get().backend_name() == "cuda" && !(device.is_cpu() && Context::get().forked());
  torch::utils::maybe_initialize_device(cuda ? c10::Device(c10::DeviceType::CUDA) : device);
}

py::dict statistics_dict(const std::optional<c10::Device>& home) {
  const Statistics statistics = without_gil([&] {
    const CachingManagedAllocator* const allocator = Context::get().allocator_in_use();
    return allocator == nullptr ? Statistics{} : allocator->statistics(home_of(home));
  });
  py::dict dict;
  for (const auto& [key, value] : statistics.flatten()) {
    dict[py::str(key)] = value;
  }
  return dict;
}

template <auto method>
void reset(const std::optional<c10::Device>& home) {
  if (CachingManagedAllocator* const allocator = Context::get().allocator_in_use()) {
    (allocator->*method)(home_of(home));
  }
}

constexpr const char* kStateNames[] = {"active_allocated", "active_pending_free", "inactive"}; ///< by BlockInfo::State

py::list snapshot_list() {
  const std::vector<SegmentInfo> found = without_gil([] {
    const CachingManagedAllocator* const allocator = Context::get().allocator_in_use();
    return allocator == nullptr ? std::vector<SegmentInfo>{} : allocator->snapshot();
  });
  py::list segments;
  for (const SegmentInfo& segment : found) {
    py::list blocks;
    for (const BlockInfo& block : segment.blocks) {
      py::dict described;
      described["address"] = block.address;
      described["size"] = block.bytes;
      described["requested_size"] = block.requested_bytes;
      described["state"] = kStateNames[static_cast<std::size_t>(block.state)];
      described["device"] = block.home.index; // -1 is the host
      described["stream"] = reinterpret_cast<std::uintptr_t>(block.stream.handle);
      blocks.append(std::move(described));
    }
    py::dict described;
    described["device"] = segment.home.index;
    described["address"] = segment.address;
    described["total_size"] = segment.bytes;
    described["allocated_size"] = segment.allocated_bytes;
    described["active_size"] = segment.active_bytes;
    described["requested_size"] = segment.requested_bytes;
    described["segment_type"] = segment.kind == PoolKind::kSmall ? "small" : "large";
    described["blocks"] = std::move(blocks);
    segments.append(std::move(described));
  }
  return segments;
}

py::list options_list() {
  const std::vector<OptionInfo> options = without_gil([] { return describe_options(Context::get().options()); });
  py::list rows;
  for (const OptionInfo& option : options) {
    py::dict row;
    row["key"] = option.key;
    row["accepted"] = option.accepted;
    row["description"] = option.description;
    row["default"] = option.default_value;
    row["value"] = option.value;
    rows.append(std::move(row));
  }
  return rows;
}

py::dict residency_by_device(const std::vector<at::Tensor>& tensors) {
  const auto places = without_gil([&] { return residency(tensors); });
  py::dict dict;
  for (const auto& [device, bytes] : places) {
    dict[py::cast(device)] = bytes;
  }
  return dict;
}

/// Whether two of the values are tensors with different labels on the same bytes.
bool share_bytes(const py::sequence& values) {
  std::vector<std::pair<const void*, const c10::StorageImpl*>> labelled;
  for (const py::handle value : values) {
    if (!THPVariable_Check(value.ptr())) {
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    if (tensor.layout() != c10::kStrided || !tensor.has_storage() || !has_owner(data_of(tensor.storage()))) {
      continue;
    }
    const void* const bytes = data_behind_labels(data_of(tensor.storage())).get();
    const c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (std::ranges::any_of(labelled,
                            [&](const auto& other) { return other.first == bytes && other.second != storage; })) {
      return true;
    }
    labelled.emplace_back(bytes, storage);
  }
  return false;
}

} // namespace

void bind_tensor(py::module_& module) {
  register_operators();
  register_hints();
  module.def("set_enabled", &set_managed_enabled, py::arg("on"), keeps_gil);
  module.def("is_enabled", &managed_enabled, keeps_gil);
  // The destructor of a scope may free its allocator.
  py::class_<ManagedScope>(module, "Scope", py::release_gil_before_calling_cpp_dtor())
      .def(py::init<bool>(), py::arg("on"), no_gil)
      .def(py::init([](bool on, std::shared_ptr<Allocator> allocator) { // None: the process's allocator
             return without_gil(
                 [&] { return std::make_unique<ManagedScope>(on, AllocatorChoice(std::move(allocator))); });
           }),
           py::arg("on"), py::arg("allocator").none(true), no_gil_inside)
      .def("close", &ManagedScope::close, no_gil);

  module.def(
      "load_options",
      [](const std::string& text) { change_options([&](Options& options) { options = parse_options(text); }); },
      py::arg("text"), no_gil);
  module.def(
      "set_option",
      [](const std::string& key, const std::string& value) {
        change_options([&](Options& options) { set_option(options, key, value); });
      },
      py::arg("key"), py::arg("value"), no_gil);
  module.def("describe_options", &options_list, no_gil_inside);
  module.def("parse_bytes", [](const std::string& text) { return parse_bytes(text); }, py::arg("text"), keeps_gil);
  module.def("format_bytes", &format_bytes, py::arg("count"), keeps_gil);
  module.def(
      "set_limit",
      [](std::optional<std::size_t> limit) { change_options([&](Options& options) { options.limit = limit; }); },
      py::arg("limit"), no_gil);
  module.def("get_limit", [] { return Context::get().options().limit; }, no_gil);

#ifdef TORCH_UVM_WITH_CUDA
  constexpr bool kWithCuda = true;
  module.def("cuda_register", &cuda::register_backend, no_gil);
  module.def("cuda_install", [] { Context::get().runtime(); }, no_gil); // which installs the allocator
#else
  constexpr bool kWithCuda = false;
  const auto refuse = [] { throw std::runtime_error("torch_uvm was built without CUDA"); };
  module.def("cuda_register", refuse, keeps_gil);
  module.def("cuda_install", refuse, keeps_gil);
#endif
  module.def("set_host_tensors", &set_host_tensors, py::arg("on"), no_gil);
  module.def("host_tensors", &host_tensors, keeps_gil);
  module.def("built_with_cuda", [] { return kWithCuda; }, keeps_gil);
  module.def("backend", [] { return Context::get().backend_name(); }, no_gil);
  module.def("in_use", [] { return Context::get().in_use(); }, keeps_gil);
  module.def(
      "managed_bytes", [] { return Context::get().in_use() ? Context::get().runtime().managed_bytes() : 0; }, no_gil);
  module.def(
      "peak_managed_bytes", [] { return Context::get().in_use() ? Context::get().runtime().peak_managed_bytes() : 0; },
      no_gil);
  module.def("host_memory_available", [] { return operating_system_memory_available(); }, no_gil);
  module.def(
      "device_properties",
      [](int index) {
        const auto [properties, memory] = without_gil([&] {
          ManagedRuntime& runtime = Context::get().runtime();
          return std::pair(runtime.device_properties(index), runtime.memory_info(index));
        });
        py::dict dict;
        dict["name"] = properties.name;
        dict["total_memory"] = properties.total_memory;
        dict["free_memory"] = memory.free;
        dict["managed_memory"] = properties.managed_memory;
        dict["concurrent_managed_access"] = properties.concurrent_managed_access;
        dict["pageable_memory_access"] = properties.pageable_memory_access;
        dict["integrated"] = properties.integrated;
        dict["host_page_tables"] = properties.host_page_tables;
        dict["direct_managed_access"] = properties.direct_managed_access;
        dict["one_memory"] = properties.one_memory();
        dict["page_bytes"] = properties.page_bytes;
        return dict;
      },
      py::arg("index"), no_gil_inside);

  module.def(
      "is_managed",
      [](const at::Tensor& tensor) {
        // functorch's wrappers may need an operator. Other tensors need no lock, and this call is frequent.
        constexpr c10::DispatchKeySet kWrappers(
            {c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched});
        return tensor.key_set().has_any(kWrappers) ? without_gil([&] { return is_managed(tensor); })
                                                   : is_managed(tensor);
      },
      py::arg("tensor"), no_gil_inside);
  module.def("move_for_module", &move_for_module, py::arg("tensor"), py::arg("device"), py::arg("non_blocking"),
             no_gil);
  module.def(
      "adopt",
      [](const at::Tensor& tensor, const c10::Device& device) {
        if (!may_adopt(tensor)) {
          return false;
        }
        start_device(device);
        return adopt(tensor);
      },
      py::arg("tensor"), py::arg("device"), no_gil);
  module.def("has_bytes", &has_bytes, py::arg("tensor"), keeps_gil);
  module.def("residency", &residency_by_device, py::arg("tensors"), no_gil_inside);
  module.def("share_bytes", &share_bytes, py::arg("values"), keeps_gil);
  module.def("start_device", &start_device, py::arg("device"), no_gil);
  module.def(
      "empty_strided",
      [](const std::vector<std::int64_t>& size, const std::vector<std::int64_t>& stride, c10::ScalarType dtype,
         const c10::Device& device) {
        start_device(device);
        return empty_strided_managed(size, stride, dtype, device);
      },
      py::arg("size"), py::arg("stride"), py::arg("dtype"), py::arg("device"), no_gil);
  module.def("memory_stats", &statistics_dict, py::arg("home"), no_gil_inside);
  module.def("reset_peak_memory_stats", &reset<&CachingManagedAllocator::reset_peak_statistics>, py::arg("home"),
             no_gil);
  module.def("reset_accumulated_memory_stats", &reset<&CachingManagedAllocator::reset_accumulated_statistics>,
             py::arg("home"), no_gil);
  module.def("memory_snapshot", &snapshot_list, no_gil_inside);
  module.def(
      "empty_cache",
      [] {
        CachingManagedAllocator* allocator = Context::get().allocator_in_use();
        return allocator == nullptr ? 0 : allocator->empty_cache();
      },
      no_gil);
}

} // namespace torch_uvm
