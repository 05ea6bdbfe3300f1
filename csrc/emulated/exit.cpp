// Synchronisation with autograd's threads before the interpreter ends.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "emulated/backend.h"
#include "tensor/process/context.h"

namespace torch_uvm::emulated {
namespace {

constexpr std::chrono::seconds kPatience(5); // a hanging backward pass must not block exit

// Runs an empty backward pass on every device. A device's thread runs its tasks in order, so when the empty pass is
// done, the earlier ones are destroyed. It is called on a new thread, so the empty pass holds no Python object itself.
void pass_through_every_device() {
  for (int device = 0; device < device_count(); ++device) {
    const auto options = at::TensorOptions().device(c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(device)));
    const at::Tensor input = at::empty({0}, options).set_requires_grad(true);
    torch::autograd::backward({input.view({0, 1})}, {at::empty({0, 1}, options)});
  }
}

} // namespace

void finish_backward_threads() noexcept {
  try {
    if (!Context::get().in_use() || Context::get().forked()) {
      return;
    }
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> finished = done->get_future();
    std::thread([done] {
      try {
        pass_through_every_device();
      } catch (const std::exception&) {
        // An error cannot be handled at exit.
      }
      done->set_value();
    }).detach();
    finished.wait_for(kPatience);
  } catch (const std::exception&) {
    // No thread could be started: exit without waiting.
  }
}

} // namespace torch_uvm::emulated
