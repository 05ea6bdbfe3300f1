// The operators torch_uvm::prefetch, advise and discard. Fake kernels are in torch_uvm/_residency/hints.py.
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/library.h>

#include "runtime/error.h"
#include "tensor/hints/hints.h"
#include "tensor/process/context.h"

namespace torch_uvm {
namespace {

using IntList = at::OptionalIntArrayRef;

std::vector<Location> locations(at::IntArrayRef indices) {
  const int devices = Context::get().runtime().device_count();
  std::vector<Location> made;
  for (const std::int64_t index : indices) {
    TORCH_CHECK_VALUE(index >= -1 && index < devices, "location ", index,
                      "; accepted: -1 for the CPU, and the indices of ", devices, " devices, from 0");
    made.push_back(Location{static_cast<int>(index)});
  }
  return made;
}

/// Calls `function`, translating errors of the runtime into torch's.
template <class Function>
void asking(Function function) {
  try {
    function();
  } catch (const InvalidArgument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  } catch (const RuntimeFailure& error) {
    TORCH_CHECK(false, error.what());
  }
}

/// \param numbers the fields of a torch.Stream: stream_id, device_index, device_type
Stream stream_of(at::IntArrayRef numbers) {
  TORCH_CHECK_VALUE(numbers.size() == 3, "a stream of ", numbers.size(),
                    " numbers; accepted: its id, device index and device type");
  const auto accelerator = at::getAccelerator();
  TORCH_CHECK_VALUE(accelerator, "a stream where there is no accelerator; accepted: none");
  TORCH_CHECK_VALUE(numbers[2] == static_cast<std::int64_t>(*accelerator), "a stream of the device type ", numbers[2],
                    "; accepted: ", static_cast<std::int64_t>(*accelerator), ", which is the accelerator's, ",
                    *accelerator);
  const c10::impl::VirtualGuardImpl guard(*accelerator);
  TORCH_CHECK_VALUE(numbers[1] >= 0 && numbers[1] < guard.deviceCount(), "a stream of ", *accelerator, ":", numbers[1],
                    "; accepted: indices from 0 to ", guard.deviceCount() - 1);
  const auto stream = c10::Stream::unpack3(numbers[0], static_cast<c10::DeviceIndex>(numbers[1]), *accelerator);
  return Stream{stream.device_index(), guard.getStreamNativeHandle(stream)};
}

void prefetch_kernel(at::TensorList tensors, std::optional<c10::Device> device, IntList stream) {
  const std::optional<Stream> chosen = stream ? std::optional(stream_of(*stream)) : std::nullopt;
  asking([&] { prefetch(tensors.vec(), device, chosen); });
}

/// Locations are -1 for the CPU, else the index of a device.
/// \param preferred_location one location, or empty to unset it
void advise_kernel(at::TensorList tensors, std::optional<bool> read_mostly, IntList preferred_location,
                   IntList accessed_by) {
  asking([&] {
    AdviceChange change;
    change.read_mostly = read_mostly;
    if (preferred_location) {
      TORCH_CHECK_VALUE(preferred_location->size() <= 1, preferred_location->size(),
                        " preferred locations; accepted: one, or none");
      const std::vector<Location> preferred = locations(*preferred_location);
      change.preferred_location = preferred.empty() ? std::nullopt : std::optional(preferred.front());
    }
    if (accessed_by) {
      change.accessed_by = locations(*accessed_by);
    }
    advise(tensors.vec(), change);
  });
}

void discard_kernel(at::TensorList tensors) {
  asking([&] { discard(tensors.vec()); });
}

void call_discard(at::TensorList tensors) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("torch_uvm::discard", "").typed<void(at::TensorList)>();
  op.call(tensors);
}

// A discard is a write, so it has the checks of in-place operators, made for all tensors before anything is discarded.

void discard_autograd(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    torch::autograd::check_inplace(tensor, tensor.requires_grad());
  }
  const at::AutoDispatchBelowAutograd below;
  call_discard(tensors);
}

void discard_in_place(at::TensorList tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(!tensor.is_inference() || c10::InferenceMode::is_enabled(),
                "a discard of an inference tensor outside InferenceMode; clone it, or stay inside");
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    call_discard(tensors);
  }
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

} // namespace

void register_hints() {
  // Leaked: deregistration at exit would race with threads that are still running.
  auto& definition = *new torch::Library(torch::Library::FRAGMENT, "torch_uvm", std::nullopt, __FILE__, __LINE__);
  definition.def("prefetch(Tensor[] tensors, Device? device=None, *, int[]? stream=None) -> ()");
  definition.def(
      "advise(Tensor[] tensors, *, bool? read_mostly=None, int[]? preferred_location=None, "
      "int[]? accessed_by=None) -> ()");
  definition.def("discard(Tensor(a!)[] tensors) -> ()");

  const auto library = [](c10::DispatchKey key) -> torch::Library& {
    return *new torch::Library(torch::Library::IMPL, "torch_uvm", key, __FILE__, __LINE__);
  };
  torch::Library& everywhere = library(c10::DispatchKey::CompositeExplicitAutograd);
  everywhere.impl("prefetch", TORCH_FN(prefetch_kernel));
  everywhere.impl("advise", TORCH_FN(advise_kernel));
  everywhere.impl("discard", TORCH_FN(discard_kernel));
  torch::Library& autograd = library(c10::DispatchKey::Autograd);
  autograd.impl("prefetch", torch::CppFunction::makeFallthrough());
  autograd.impl("advise", torch::CppFunction::makeFallthrough());
  autograd.impl("discard", TORCH_FN(discard_autograd));
  library(c10::DispatchKey::ADInplaceOrView).impl("discard", TORCH_FN(discard_in_place));
}

} // namespace torch_uvm
