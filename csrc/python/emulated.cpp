// Bindings of csrc/emulated, the emulated accelerator.
#include "emulated/backend.h"
#include "emulated/generator.h"
#include "emulated/operands.h"

#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "python/bindings.h"
#include "runtime/emulated/cost_profile.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/adopted_storage.h"
#include "tensor/storage/block_storage.h"
#include "tensor/storage/labels.h"

namespace torch_uvm {
namespace {

namespace py = pybind11;

py::dict counters_dict(std::optional<int> device) {
  const EmulatedCounters counters = without_gil([&] { return emulated::runtime().counters(device); });
  py::dict dict;
#define TORCH_UVM_COUNTER(name) dict[#name] = counters.name;
  TORCH_UVM_EMULATED_COUNTERS(TORCH_UVM_COUNTER)
#undef TORCH_UVM_COUNTER
  return dict;
}

ResidencyInfo residency_of(const at::Tensor& tensor) {
  const std::optional<Engine::Lock> lock = lock_engine();
  const Touch range = emulated::access_of(tensor, false);
  const c10::DataPtr& data = data_of(tensor.storage());
  if (range.bytes != 0 && !is_on_host(data) && !is_adopted(data_behind_labels(data))) {
    return emulated::runtime().residency(range.ptr, range.bytes);
  }
  ResidencyInfo info;
  info.host = range.bytes; // pinned memory, or a file's mapping
  info.devices.resize(static_cast<std::size_t>(emulated::device_count()));
  return info;
}

py::dict residency_dict(const at::Tensor& tensor) {
  const ResidencyInfo info = without_gil([&] { return residency_of(tensor); });
  py::dict dict;
  dict["host"] = info.host;
  dict["devices"] = info.devices;
  dict["untouched"] = info.untouched;
  return dict;
}

} // namespace

void bind_emulated(py::module_& module) {
  module.def("emu_register", &emulated::register_accelerator, no_gil);
  module.def("emu_is_registered", &emulated::is_registered, keeps_gil);
  module.def(
      "emu_configure",
      [](int devices, std::size_t memory, const std::string& profile, std::optional<std::uint64_t> schedule_seed) {
        TORCH_CHECK(Context::get().backend_name() != "cuda",
                    "the emulated accelerator is not in use in this process, whose backend is 'cuda'; "
                    "TORCH_UVM_DEVICE=emu registers it");
        Context::get().change_options(
            [&](Options& options) { options.emulated = {devices, memory, profile, schedule_seed}; });
      },
      py::arg("devices"), py::arg("memory"), py::arg("profile"), py::arg("schedule_seed"), no_gil);
  module.def("emu_profiles", &CostProfile::names, keeps_gil);
  module.def("emu_counters", &counters_dict, py::arg("device"), no_gil_inside);
  module.def("emu_reset_counters", [] { emulated::runtime().reset_counters(); }, no_gil);
  module.def(
      "emu_resident_bytes", [](int device) { return emulated::runtime().resident_bytes(device); }, py::arg("device"),
      no_gil);
  module.def(
      "emu_peak_resident_bytes", [](int device) { return emulated::runtime().peak_resident_bytes(device); },
      py::arg("device"), no_gil);
  module.def("emu_time_us", [] { return emulated::runtime().time_us(); }, no_gil);
  module.def(
      "emu_timeline",
      [](int device) {
        std::vector<std::tuple<double, std::size_t, std::size_t, std::size_t>> samples;
        for (const ResidencySample& sample : emulated::runtime().timeline(device)) {
          samples.emplace_back(sample.time_us, sample.device_bytes, sample.plain_bytes, sample.managed_bytes);
        }
        return samples;
      },
      py::arg("device"), no_gil);
  module.def("emu_residency", &residency_dict, py::arg("tensor"), no_gil_inside);

  // Functions of torch.emu that torch.accelerator does not have.
  module.def("emu_device_count", &emulated::device_count, no_gil);
  module.def("emu_default_generator", [](int device) { return emulated::default_generator(device); }, no_gil);
  module.def("emu_finish_backward_threads", &emulated::finish_backward_threads, no_gil);
  module.def("emu_in_bad_fork", [] { return Context::get().forked(); }, keeps_gil);
}

} // namespace torch_uvm
