#include "tensor/moves.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>

#include "runtime/error.h"
#include "tensor/context.h"
#include "tensor/labels.h"
#include "tensor/managed_storage.h"

namespace torch_uvm {
namespace {

/// The stream that is current on a device, as the runtime knows it.
Stream current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return Stream{device.index(), guard.getStreamNativeHandle(guard.getStream(device))};
}

/// Makes `later` wait for what is queued on `earlier` now.
void order(Stream earlier, Stream later) {
  ManagedRuntime& runtime = Context::get().runtime();
  const Event event = runtime.create_event(earlier.device, /*timing=*/false);
  runtime.record_event(event, earlier);
  runtime.wait_event(later, event);
  runtime.destroy_event(event);
}

/// Waits on the host for what is queued on `stream` now, and not for what others queue there later.
void wait_for(Stream stream) {
  ManagedRuntime& runtime = Context::get().runtime();
  if (runtime.query_stream(stream)) {
    return;
  }
  const Event event = runtime.create_event(stream.device, /*timing=*/false);
  runtime.record_event(event, stream);
  runtime.synchronize_event(event);
  runtime.destroy_event(event);
}

/// The bytes that a tensor's sizes and strides reach.
std::pair<char*, std::size_t> range_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {nullptr, 0};
  }
  auto* base = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  return {base + static_cast<std::size_t>(tensor.storage_offset()) * tensor.itemsize(),
          at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())};
}

void synchronise(const at::Tensor& self, c10::Device to, bool non_blocking) {
  CachingManagedAllocator& allocator = Context::get().managed_allocator();
  Block* block = block_of(self.storage().data_ptr());
  const auto [ptr, bytes] = range_of(self);
  if (block == nullptr || bytes == 0) {
    return;
  }
  const c10::Device from = self.device();
  const Stream owner = allocator.stream(block); // who used it last, as far as the allocator was told
  if (to.is_cpu()) {
    if (!non_blocking) {
      wait_for(current_stream(from));
      if (!owner.is_host() && owner != current_stream(from)) {
        wait_for(owner);
      }
    }
    allocator.set_home(block, Location::host(), Stream::host());
    return;
  }
  const Stream stream = current_stream(to);
  if (!from.is_cpu() && current_stream(from) != stream) {
    order(current_stream(from), stream);
  }
  if (!owner.is_host() && owner != stream && (from.is_cpu() || owner != current_stream(from))) {
    order(owner, stream);
  }
  if (Context::get().runtime().device_properties(to.index()).concurrent_managed_access) {
    Context::get().runtime().prefetch(ptr, bytes, Location::device(to.index()), stream);
  }
  allocator.set_home(block, Location::device(to.index()), stream);
}

/// The device with its index, checked.
c10::Device resolve(c10::Device device) {
  if (device.is_cpu()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  TORCH_CHECK_VALUE(device.type() == c10::DeviceType::PrivateUse1, "a move to ", device,
                    "; accepted: the CPU and the accelerator");
  const c10::impl::VirtualGuardImpl guard(device.type());
  return device.has_index() ? guard.getStream(device).device() : guard.getDevice();
}

at::Tensor move_kernel(const at::Tensor& self, c10::Device to, bool non_blocking) {
  TORCH_CHECK_VALUE(
      self.layout() == c10::kStrided && is_managed(self.storage().data_ptr()),
      "a move of a tensor that is not managed; torch_uvm.to(t, device, managed=True) makes a managed copy");
  TORCH_CHECK(!Context::get().forked(),
              "a move in a forked process: its devices belong to the parent, and it has the bytes of CPU labels only");
  const c10::Device device = resolve(to);
  try {
    synchronise(self, device, non_blocking);
  } catch (const InvalidArgument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  c10::Allocator* allocator = device.is_cpu() ? c10::GetCPUAllocator() : c10::GetAllocator(device.type());
  const c10::DispatchKey key = device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::PrivateUse1;
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(with_label(self.storage(), device, allocator),
                                                             c10::DispatchKeySet(key), self.dtype());
  c10::TensorImpl* impl = view.unsafeGetTensorImpl();
  impl->set_storage_offset(self.storage_offset());
  impl->set_sizes_and_strides(self.sizes(), self.strides());
  impl->_set_conj(self.is_conj());
  impl->_set_neg(self.is_neg());
  if (!self.is_inference() && !view.is_inference()) {
    impl->set_version_counter(self.unsafeGetTensorImpl()->version_counter());
  }
  return view;
}

struct MoveFunction final : torch::autograd::Function<MoveFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& self, c10::Device device,
                            bool non_blocking) {
    context->saved_data["device"] = self.device();
    at::Tensor moved;
    {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      moved = move_kernel(self, device, non_blocking);
    }
    // A view to autograd: one version counter, and writing to it in place where that would go round
    // the history of `self` raises.
    return torch::autograd::as_view(self, moved,
                                    /*is_bw_differentiable=*/true,
                                    /*is_fw_differentiable=*/false,
                                    /*view_func=*/nullptr,
                                    /*rev_view_func=*/nullptr, torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const c10::Device device = context->saved_data["device"].toDevice();
    at::Tensor gradient = gradients[0];
    if (gradient.defined() && gradient.device() != device) {
      gradient = gradient.layout() == c10::kStrided && is_managed(gradient.storage().data_ptr())
                     ? move(gradient, device, /*non_blocking=*/false)
                     : gradient.to(device);
    }
    return {gradient, at::Tensor(), at::Tensor()};
  }
};

at::Tensor move_autograd(const at::Tensor& self, c10::Device device, bool non_blocking) {
  if (!at::GradMode::is_enabled() || !self.requires_grad()) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return move_kernel(self, device, non_blocking);
  }
  return MoveFunction::apply(self, device, non_blocking);
}

c10::DispatchKey autograd_key(c10::DispatchKey backend) {
  return backend == c10::DispatchKey::CPU ? c10::DispatchKey::AutogradCPU : c10::DispatchKey::AutogradPrivateUse1;
}

} // namespace

at::Tensor move(const at::Tensor& self, c10::Device device, bool non_blocking) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("torch_uvm::move", "")
                             .typed<at::Tensor(const at::Tensor&, c10::Device, bool)>();
  return op.call(self, device, non_blocking);
}

void register_moves() {
  static std::once_flag once;
  std::call_once(once, [&] {
    // Leaked: deregistering at exit would race with what still runs then.
    auto& definition = *new torch::Library(torch::Library::DEF, "torch_uvm", std::nullopt, __FILE__, __LINE__);
    definition.def("move(Tensor(a) self, Device device, bool non_blocking=False) -> Tensor(a)");
    for (const c10::DispatchKey key : {c10::DispatchKey::CPU, c10::DispatchKey::PrivateUse1}) {
      auto& kernel = *new torch::Library(torch::Library::IMPL, "torch_uvm", key, __FILE__, __LINE__);
      kernel.impl("move", TORCH_FN(move_kernel));
      auto& differentiable =
          *new torch::Library(torch::Library::IMPL, "torch_uvm", autograd_key(key), __FILE__, __LINE__);
      differentiable.impl("move", TORCH_FN(move_autograd));
    }
  });
}

} // namespace torch_uvm
