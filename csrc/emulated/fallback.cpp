#include "emulated/fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <span>

#include "emulated/backend.h"
#include "emulated/generator.h"
#include "emulated/memory.h"

namespace torch_uvm::emulated {
namespace {

using Kind = OperatorInfo::Kind;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

/// Calls `visit` with each defined tensor of an argument.
template <class Visit>
void for_each_tensor(Kind kind, const c10::IValue& value, Visit visit) {
  if (kind == Kind::kTensor) {
    if (value.isTensor() && value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (kind == Kind::kTensorList && value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) {
        visit(element.toTensor());
      }
    }
  }
}

c10::IValue list_to_cpu(const c10::IValue& value, bool written, Operands& operands,
                        c10::SmallVectorImpl<Touch>& accesses) {
  const auto convert = [&](const at::Tensor& tensor) {
    if (!is_ours(tensor)) {
      return tensor;
    }
    at::Tensor cpu = operands.to_cpu(tensor, written);
    accesses.push_back(access_of(tensor, written));
    return cpu;
  };
  if (value.isTensorList()) {
    c10::List<at::Tensor> converted;
    converted.reserve(value.toListRef().size());
    for (const c10::IValue& element : value.toListRef()) {
      converted.push_back(convert(element.toTensor()));
    }
    return converted;
  }
  c10::List<std::optional<at::Tensor>> converted;
  converted.reserve(value.toListRef().size());
  for (const c10::IValue& element : value.toListRef()) {
    converted.push_back(element.isTensor() ? std::optional(convert(element.toTensor())) : std::nullopt);
  }
  return converted;
}

} // namespace

int common_device(const c10::OperatorHandle& op, const OperatorInfo& info, const torch::jit::Stack& stack) {
  const std::size_t first = stack.size() - info.arguments.size();
  std::optional<c10::Device> common;
  std::optional<c10::Device> stranger;
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    const OperatorInfo::Argument& argument = info.arguments[i];
    const c10::IValue& value = stack[first + i];
    if (argument.kind == Kind::kDevice && value.isDevice() && value.toDevice().type() == kDeviceType && !common) {
      common = c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(checked_index(value.toDevice().index())));
    }
    for_each_tensor(argument.kind, value, [&](const at::Tensor& tensor) {
      if (tensor.device().type() == kDeviceType) {
        if (common && *common != tensor.device()) {
          stranger = tensor.device();
        } else {
          common = tensor.device();
        }
      } else if (!tensor.device().is_cpu() || !(argument.may_be_cpu || (argument.may_be_number && tensor.dim() == 0))) {
        stranger = tensor.device();
      }
    });
  }
  TORCH_CHECK(!stranger, "Expected all tensors to be on the same device, but found at least two devices, ",
              common ? common->str() : std::string("emu"), " and ", stranger->str(), "! (when calling ",
              op.schema().name(), ")");
  return common ? common->index() : current_device();
}

void arguments_to_cpu(const OperatorInfo& info, int device, torch::jit::Stack* stack, Operands& operands,
                      c10::SmallVectorImpl<Touch>& accesses) {
  const std::size_t first = stack->size() - info.arguments.size();
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    const OperatorInfo::Argument& argument = info.arguments[i];
    c10::IValue& value = (*stack)[first + i];
    switch (argument.kind) {
      case Kind::kTensor:
        if (value.isTensor() && is_ours(value.toTensor())) {
          const at::Tensor& tensor = value.toTensor();
          accesses.push_back(access_of(tensor, argument.written));
          value = operands.to_cpu(tensor, argument.written);
        }
        break;
      case Kind::kTensorList:
        if (value.isList()) {
          value = list_to_cpu(value, argument.written, operands, accesses);
        }
        break;
      case Kind::kGenerator:
        value = unwrap(value.isGenerator() ? value.toGenerator() : default_generator(device), device);
        break;
      case Kind::kDevice:
        if (value.isDevice() && value.toDevice().type() == kDeviceType) {
          value = c10::Device(c10::DeviceType::CPU);
        }
        break;
      case Kind::kOther:
        break;
    }
  }
}

void returns_to_device(const OperatorInfo& info, torch::jit::Stack* stack, Operands& operands) {
  const std::size_t first = stack->size() - info.returns;
  for (std::size_t i = 0; i < info.returns; ++i) {
    c10::IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      if ((info.cpu_returns >> i & 1u) != 0) {
        const OrdinaryAllocationScope ordinary;
        value = value.toTensor().clone();
      } else {
        value = operands.to_device(value.toTensor());
      }
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> converted;
      converted.reserve(value.toListRef().size());
      for (const c10::IValue& element : value.toListRef()) {
        converted.push_back(operands.to_device(element.toTensor()));
      }
      value = std::move(converted);
    }
  }
}

void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OperatorInfo& info = operator_info(op);
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "Could not run '", op.schema().operator_name(),
      "' on the emulated accelerator: it runs the CPU's kernels, and the CPU has none for this operator");
  const int device = common_device(op, info, *stack);
  const Stream stream = current_stream(device);

  Operands operands(device);
  c10::SmallVector<Touch, 8> accesses;
  arguments_to_cpu(info, device, stack, operands, accesses);
  if (!info.is_view) {
    check_not_forked();
    runtime().begin_kernel(stream, std::span<const Touch>(accesses.data(), accesses.size()));
  }
  {
    // The kernel's own operators are the CPU's business: no autograd, no autocast, and what it
    // allocates is memory of the device.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const AllocationScope on_device(device);
    std::optional<BorrowedDefaultGenerator> borrowed;
    if (info.draws_by_default) {
      borrowed.emplace(device);
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  operands.write_back();
  returns_to_device(info, stack, operands);
  if (!info.is_view && !operands.fresh().empty()) {
    runtime().end_kernel(stream, std::span<const Touch>(operands.fresh().data(), operands.fresh().size()));
  }
}

} // namespace torch_uvm::emulated
