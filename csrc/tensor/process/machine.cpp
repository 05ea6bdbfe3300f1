#include "tensor/process/machine.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <ranges>

#include "tensor/process/context.h"

namespace torch_uvm {
namespace {

std::atomic<bool> pretending{false};

} // namespace

void Machine::pretend_not_concurrent(bool pretend) {
  pretending.store(pretend);
}

const Machine& Machine::get() {
  static const auto* machine = [] {
    auto* made = new Machine(); // leaked: blocks are freed after static destructors have run
    const ManagedRuntime& runtime = Context::get().runtime();
    for (int device = 0; device < runtime.device_count(); ++device) {
      const DeviceProperties properties = runtime.device_properties(device);
      made->page_bytes = std::max(made->page_bytes, properties.page_bytes);
      made->concurrent.push_back(properties.concurrent_managed_access);
      made->one_memory.push_back(properties.one_memory());
      made->adopts = made->adopts && properties.one_memory() && properties.pageable_memory_access;
    }
    return made;
  }();
  return *machine;
}

bool Machine::takes_hints(int device) const {
  if (Context::get().forked()) {
    return false; // the pages belong to the parent
  }
  if (concurrent.at(static_cast<std::size_t>(device)) && !pretending.load(std::memory_order_relaxed)) {
    return true;
  }
  TORCH_WARN_ONCE(
      "torch_uvm: hints about managed memory do nothing here (said once), and results are the same: device ", device,
      " cannot touch it at the same time as the host; `python -m torch_uvm info` says more");
  return false;
}

std::vector<int> Machine::exclusive_devices() const {
  std::vector<int> found;
  for (std::size_t device = 0; device < concurrent.size(); ++device) {
    if (!concurrent[device] || pretending.load(std::memory_order_relaxed)) {
      found.push_back(static_cast<int>(device));
    }
  }
  return found;
}

bool Machine::takes_hints() const {
  return std::ranges::all_of(std::views::iota(0, static_cast<int>(concurrent.size())),
                             [this](int device) { return takes_hints(device); });
}

c10::Device torch_device(Location location) {
  return location.is_host()
             ? c10::Device(c10::DeviceType::CPU)
             : c10::Device(at::getAccelerator(/*checked=*/true).value(), static_cast<c10::DeviceIndex>(location.index));
}

c10::Device resolve_device(c10::Device device, const char* what) {
  if (device.is_cpu()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  const std::optional<c10::DeviceType> accelerator = at::getAccelerator();
  TORCH_CHECK_VALUE(accelerator && device.type() == *accelerator, what, " ", device,
                    "; accepted: the CPU and the accelerator");
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (!device.has_index()) {
    return guard.getDevice();
  }
  TORCH_CHECK_VALUE(device.index() >= 0 && device.index() < guard.deviceCount(), what, " ", device,
                    "; accepted: ", accelerator.value(), ":0 to ", accelerator.value(), ":", guard.deviceCount() - 1,
                    ", and the CPU");
  return device;
}

} // namespace torch_uvm
