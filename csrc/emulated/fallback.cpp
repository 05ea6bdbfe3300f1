#include "emulated/fallback.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "emulated/backend.h"
#include "emulated/generator.h"
#include "emulated/memory.h"
#include "emulated/operands.h"
#include "emulated/operator_info.h"

namespace torch_uvm::emulated {
namespace {

constexpr std::size_t kManyRows = 1 << 20; // bytes; below, reading the index costs more than it saves

/// The rows that the index selects, each once, with adjacent rows merged into one access. nullopt if a row is out of
/// range: the kernel will raise.
template <class Number>
std::optional<c10::SmallVector<Touch, 8>> touch_rows(const Touch& all, std::size_t row_bytes, std::size_t stride,
                                                     std::int64_t rows, std::span<const Number> index) {
  std::vector<Number> wanted(index.begin(), index.end());
  std::ranges::sort(wanted);
  if (!wanted.empty() && (wanted.front() < 0 || wanted.back() >= rows)) {
    return std::nullopt;
  }
  c10::SmallVector<Touch, 8> touches;
  for (auto row = wanted.begin(); row != wanted.end();) {
    const Number first = *row;
    Number last = first;
    for (; row != wanted.end() && *row <= last + 1; ++row) {
      last = *row;
    }
    const auto* begin = static_cast<const char*>(all.ptr) + static_cast<std::size_t>(first) * stride;
    touches.push_back({begin, static_cast<std::size_t>(last - first) * stride + row_bytes, all.write});
  }
  return touches;
}

/// For an operator that uses only some rows of a large tensor: replaces the tensor's access by accesses to the rows.
void narrow_to_rows(const OperatorInfo& info, const torch::jit::Stack& stack, Stream stream,
                    c10::SmallVectorImpl<Touch>& accesses) {
  const auto argument = [&](std::size_t i) -> const c10::IValue& {
    return stack[stack.size() - info.arguments.size() + i];
  };
  const OperatorInfo::Rows& rows = *info.rows;
  if (!argument(rows.tensor).isTensor() || !argument(rows.index).isTensor()) {
    return;
  }
  const at::Tensor& table = argument(rows.tensor).toTensor();
  const at::Tensor& index = argument(rows.index).toTensor();
  const bool of_rows = !rows.dim || (argument(*rows.dim).isInt() &&
                                     (argument(*rows.dim).toInt() == 0 || argument(*rows.dim).toInt() == -table.dim()));
  if (!of_rows || !table.defined() || table.layout() != c10::Layout::Strided || table.is_nested() || !index.defined() ||
      table.dim() == 0 || !index.is_contiguous()) {
    return;
  }
  const Touch all = access_of(table, info.arguments[rows.tensor].written);
  auto* const access =
      std::ranges::find_if(accesses, [&](const Touch& one) { return one.ptr == all.ptr && one.bytes == all.bytes; });
  if (all.bytes <= kManyRows || access == accesses.end()) {
    return;
  }
  runtime().wait_in_kernel(stream); // a pending copy may still write the index
  const std::size_t stride = static_cast<std::size_t>(table.stride(0)) * table.itemsize();
  const std::size_t row_bytes = all.bytes - static_cast<std::size_t>(table.size(0) - 1) * stride;
  const auto count = static_cast<std::size_t>(index.numel());
  std::optional<c10::SmallVector<Touch, 8>> touches;
  if (index.scalar_type() == c10::ScalarType::Long) {
    touches =
        touch_rows<std::int64_t>(all, row_bytes, stride, table.size(0), {index.const_data_ptr<std::int64_t>(), count});
  } else if (index.scalar_type() == c10::ScalarType::Int) {
    touches =
        touch_rows<std::int32_t>(all, row_bytes, stride, table.size(0), {index.const_data_ptr<std::int32_t>(), count});
  }
  if (touches) {
    accesses.erase(access);
    accesses.append(touches->begin(), touches->end());
  }
}

/// The common device of an operator's arguments, which are the last `info.arguments.size()` values of the stack.
/// \throws c10::Error for the combinations of devices that CUDA refuses
int common_device(const c10::OperatorHandle& op, const OperatorInfo& info, const torch::jit::Stack& stack) {
  const std::size_t first = stack.size() - info.arguments.size();
  std::optional<c10::Device> common;
  std::optional<c10::Device> stranger;
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    const OperatorInfo::Argument& argument = info.arguments[i];
    const c10::IValue& value = stack[first + i];
    if (argument.kind == ArgumentKind::kDevice && value.isDevice() && value.toDevice().type() == kDeviceType &&
        !common) {
      common = c10::Device(kDeviceType, static_cast<c10::DeviceIndex>(checked_index(value.toDevice().index())));
    }
    if (argument.kind != ArgumentKind::kTensor) {
      continue;
    }
    replaced(value, [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        if (common && *common != tensor.device()) {
          stranger = tensor.device();
        } else {
          common = tensor.device();
        }
      } else if (tensor.defined() && (!tensor.device().is_cpu() ||
                                      !(argument.may_be_cpu || (argument.may_be_number && tensor.dim() == 0)))) {
        stranger = tensor.device();
      }
      return tensor;
    });
  }
  TORCH_CHECK(!stranger, "Expected all tensors to be on the same device, but found at least two devices, ",
              common ? common->str() : std::string("emu"), " and ", stranger->str(), "! (when calling ",
              op.schema().name(), ")");
  return common ? common->index() : current_device();
}

/// Replaces the accelerator's tensors, generators and devices among the arguments by the CPU's. Appends each tensor's
/// access to `accesses`.
void arguments_to_cpu(const OperatorInfo& info, int device, torch::jit::Stack* stack, Operands& operands,
                      c10::SmallVectorImpl<Touch>& accesses) {
  const std::size_t first = stack->size() - info.arguments.size();
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    const OperatorInfo::Argument& argument = info.arguments[i];
    c10::IValue& value = (*stack)[first + i];
    switch (argument.kind) {
      case ArgumentKind::kTensor:
        value = replaced(value, [&](const at::Tensor& tensor) {
          if (!is_ours(tensor)) {
            return tensor;
          }
          at::Tensor cpu = operands.to_cpu(tensor, argument.written);
          if (operands.touches()) {
            add_accesses(tensor, argument.written, accesses);
          }
          return cpu;
        });
        break;
      case ArgumentKind::kGenerator:
        value = unwrap(value.isGenerator() ? value.toGenerator() : default_generator(device));
        break;
      case ArgumentKind::kDevice:
        if (value.isDevice() && value.toDevice().type() == kDeviceType) {
          value = c10::Device(c10::DeviceType::CPU);
        }
        break;
      case ArgumentKind::kOther:
        break;
    }
  }
}

/// Replaces the CPU tensors among the last `info.returns` values of the stack by the accelerator's.
void returns_to_device(const OperatorInfo& info, torch::jit::Stack* stack, Operands& operands) {
  const std::size_t first = stack->size() - info.returns;
  for (std::size_t i = 0; i < info.returns; ++i) {
    c10::IValue& value = (*stack)[first + i];
    if ((info.cpu_returns >> i & 1u) != 0) {
      const OrdinaryAllocationScope ordinary;
      value = value.toTensor().clone();
    } else {
      value = replaced(value, [&](const at::Tensor& tensor) { return operands.to_device(tensor); });
    }
  }
}

} // namespace

template <c10::DispatchKey kernel>
void cpu_kernel_fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OperatorInfo& info = operator_info(op);
  TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(kernel), "Could not run '",
                              op.schema().operator_name(),
                              "' on the emulated accelerator: it runs the CPU's kernels, and the CPU has none for this "
                              "operator",
                              kernel == c10::DispatchKey::CPU ? "" : " with sparse or nested tensors");
  const int device = common_device(op, info, *stack);
  const Stream stream = current_stream(device);

  Operands operands(device, /*touches=*/!info.is_view);
  c10::SmallVector<Touch, 8> accesses;
  arguments_to_cpu(info, device, stack, operands, accesses);
  if (!info.is_view) {
    check_not_forked();
    if (info.rows) {
      narrow_to_rows(info, *stack, stream, accesses);
    }
    runtime().begin_kernel(stream, std::span<const Touch>(accesses.data(), accesses.size()));
  }
  {
    // Operators called inside the kernel run without autograd and autocast. Memory that they allocate is the device's.
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const AllocationScope on_device(device);
    std::optional<BorrowedDefaultGenerator> borrowed;
    if (info.draws_by_default) {
      borrowed.emplace(device);
    }
    op.redispatchBoxed(c10::DispatchKeySet(kernel), stack);
  }
  operands.write_back();
  returns_to_device(info, stack, operands);
  if (!info.is_view && !operands.fresh().empty()) {
    runtime().end_kernel(stream, std::span<const Touch>(operands.fresh().data(), operands.fresh().size()));
  }
}

template void cpu_kernel_fallback<c10::DispatchKey::CPU>(const c10::OperatorHandle&, torch::jit::Stack*);
template void cpu_kernel_fallback<c10::DispatchKey::SparseCPU>(const c10::OperatorHandle&, torch::jit::Stack*);
template void cpu_kernel_fallback<c10::DispatchKey::NestedTensorCPU>(const c10::OperatorHandle&, torch::jit::Stack*);

void unsupported_fallback(const c10::OperatorHandle& op, torch::jit::Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "Could not run '", op.schema().operator_name(),
                              "' on the emulated accelerator: it has strided, sparse COO and nested tensors, but no "
                              "compressed sparse and no quantised ones");
}

} // namespace torch_uvm::emulated
