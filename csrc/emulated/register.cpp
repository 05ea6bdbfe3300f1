// Registers the accelerator with PyTorch. Nothing is registered before register_accelerator(), because a registered
// PrivateUse1 device becomes PyTorch's current accelerator even if CUDA is available.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/memory.h"
#include "tensor/dispatch/thread_state.h"
#include "tensor/process/context.h"

namespace torch_uvm::emulated {

namespace {

std::atomic<bool> registered{false};

/// Leaked: deregistering at exit would race with operators that still run.
torch::Library& library(const char* name_space, c10::DispatchKey key) {
  return *new torch::Library(torch::Library::IMPL, name_space, key, __FILE__, __LINE__);
}

/// Uses the CPU's kernels, under its dispatch key `cpu`, for the key `ours`, except for operators that are already
/// registered there.
template <c10::DispatchKey cpu>
void use_cpu_kernels(torch::Library& aten, c10::DispatchKey ours) {
  const auto fallback = [] { return torch::CppFunction::makeFromBoxedFunction<&cpu_kernel_fallback<cpu>>(); };
  // The dispatcher prefers a composite kernel to a backend fallback. But composites are slower for small operators, and
  // the results of some differ from the CPU kernel's in the last bit (layer_norm, batch_norm). So operators that have
  // both get the fallback explicitly.
  for_each_operator("aten::", cpu, [&](const c10::OperatorName& name, const c10::OperatorHandle& op) {
    constexpr std::array kComposites{c10::DispatchKey::CompositeExplicitAutograd,
                                     c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                                     c10::DispatchKey::CompositeImplicitAutograd};
    if (!op.hasKernelForDispatchKey(ours) && std::ranges::any_of(kComposites, [&](c10::DispatchKey composite) {
          return op.hasKernelForDispatchKey(composite);
        })) {
      aten.impl(c10::toString(name).c_str(), fallback());
    }
  });
  library("_", ours).fallback(fallback());
}

void register_kernels() {
  torch::Library& aten = library("aten", c10::DispatchKey::PrivateUse1);
  register_factories(aten);
  register_copies(aten);
  torch::Library& autograd = library("aten", c10::DispatchKey::AutogradPrivateUse1);
  register_by_device(autograd, aten);
  // The composite _convolution chooses an implementation by device, so it needs a kernel. Its caller aten::convolution
  // gets none, because torch.jit.trace records only _convolution.
  aten.impl("_convolution", torch::CppFunction::makeFromBoxedFunction<&cpu_kernel_fallback<c10::DispatchKey::CPU>>());
  aten.impl("convolution_backward",
            torch::CppFunction::makeFromBoxedFunction<&cpu_kernel_fallback<c10::DispatchKey::CPU>>());
  use_cpu_kernels<c10::DispatchKey::CPU>(aten, c10::DispatchKey::PrivateUse1);

  torch::Library& sparse = library("aten", c10::DispatchKey::SparsePrivateUse1);
  register_sparse(sparse);
  use_cpu_kernels<c10::DispatchKey::SparseCPU>(sparse, c10::DispatchKey::SparsePrivateUse1);
  for (const c10::DispatchKey key : {c10::DispatchKey::SparseCsrPrivateUse1, c10::DispatchKey::QuantizedPrivateUse1}) {
    library("_", key).fallback(torch::CppFunction::makeFromBoxedFunction<&unsupported_fallback>());
  }
  torch::Library& nested = library("aten", c10::DispatchKey::NestedTensorPrivateUse1);
  register_nested(nested);
  use_cpu_kernels<c10::DispatchKey::NestedTensorCPU>(nested, c10::DispatchKey::NestedTensorPrivateUse1);

  // _copy_from resolves conjugation and negation itself. PyTorch's fallbacks for them would recurse endlessly.
  for (const c10::DispatchKey lazy : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
    library("aten", lazy).impl("_copy_from", torch::CppFunction::makeFallthrough());
  }

  library("_", c10::DispatchKey::AutocastPrivateUse1).fallback(torch::CppFunction::makeFallthrough());
  register_autocast(library("aten", c10::DispatchKey::AutocastPrivateUse1));
}

} // namespace

bool is_registered() {
  return registered.load();
}

void register_accelerator() {
  static std::once_flag once;
  std::call_once(once, [] {
    Context::get().set_backend({"emulated", &make_emulated_runtime});
    c10::impl::device_guard_impl_registry[static_cast<std::size_t>(kDeviceType)].store(device_guard());
    at::RegisterPrivateUse1HooksInterface(hooks());
    c10::SetAllocator(kDeviceType, device_allocator(), /*priority=*/255);
    install_cpu_allocator();
    count_kernels(true); // must come before the first kernel
    register_kernels();
    register_collectives();
    registered.store(true);
  });
}

} // namespace torch_uvm::emulated
