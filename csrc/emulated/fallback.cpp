// The backend fallback: operators without a kernel of their own run the CPU's kernel.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "emulated/backend.h"
#include "emulated/generator.h"
#include "emulated/kernels.h"
#include "emulated/memory.h"
#include "emulated/operands.h"
#include "tensor/dispatch/observed_operators.h"

namespace torch_uvm::emulated {
namespace {

enum class ArgumentKind : std::uint8_t { kOther, kTensor, kGenerator, kDevice }; ///< kTensor: lists too

/// Properties of an operator, read once from its schema.
struct OperatorInfo {
  explicit OperatorInfo(c10::OperatorName name) : name(std::move(name)) {}

  struct Argument {
    ArgumentKind kind = ArgumentKind::kOther;
    bool written = false; ///< the operator writes to this argument
    bool may_be_cpu = false; ///< may be a CPU tensor of any size, as with CUDA
    bool may_be_number = false; ///< may be a 0-dim CPU tensor
  };

  /// Argument positions of an operator that uses only the rows of a tensor that an index selects.
  struct Rows {
    std::size_t tensor, index;
    std::optional<std::size_t> dim; ///< position of the indexed dimension's number; nullopt: dimension 0
  };

  c10::OperatorName name;
  std::vector<Argument> arguments;
  std::size_t returns = 0;
  bool is_view = false; ///< returns an alias of an argument; accesses no bytes
  bool draws_by_default = false; ///< draws random numbers but takes no generator
  std::uint32_t cpu_returns = 0; ///< bit i: return i is a CPU tensor, whatever the device
  std::optional<Rows> rows;
};

ArgumentKind kind_of(const c10::TypePtr& type) {
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return ArgumentKind::kTensor;
    case c10::TypeKind::GeneratorType:
      return ArgumentKind::kGenerator;
    case c10::TypeKind::DeviceObjType:
      return ArgumentKind::kDevice;
    case c10::TypeKind::OptionalType:
      return kind_of(type->expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::ListType: {
      const ArgumentKind element = kind_of(type->expectRef<c10::ListType>().getElementType());
      return element == ArgumentKind::kTensor ? element : ArgumentKind::kOther;
    }
    default:
      return ArgumentKind::kOther;
  }
}

// Arguments that CUDA also accepts as CPU tensors: indices, and lengths that are read on the host anyway.
bool may_be_cpu(std::string_view op, std::string_view argument) {
  static const std::unordered_map<std::string_view, std::unordered_set<std::string_view>> accepted = {
      {"aten::index", {"indices"}},
      {"aten::_unsafe_index", {"indices"}},
      {"aten::index_put", {"indices"}},
      {"aten::index_put_", {"indices"}},
      {"aten::_unsafe_index_put", {"indices"}},
      {"aten::_index_put_impl_", {"indices"}},
      {"aten::_pack_padded_sequence", {"lengths"}},
      {"aten::_pack_padded_sequence_backward", {"batch_sizes"}},
      {"aten::_pad_packed_sequence", {"batch_sizes"}},
      {"aten::_nested_from_padded", {"cpu_nested_shape_example"}},
      {"aten::_nested_view_from_buffer", {"nested_size", "nested_strides", "offsets"}},
      {"aten::_nested_view_from_buffer_copy", {"nested_size", "nested_strides", "offsets"}},
      {"aten::_ctc_loss", {"input_lengths", "target_lengths"}},
      {"aten::_ctc_loss_backward", {"input_lengths", "target_lengths"}},
  };
  const auto found = accepted.find(op);
  return found != accepted.end() && found->second.contains(argument);
}

// Operators that access only the rows in their index. An embedding runs as index_select on the CPU.
std::optional<OperatorInfo::Rows> rows_of(const c10::OperatorName& name) {
  static const std::unordered_map<std::string_view, OperatorInfo::Rows> known = {
      {"aten::index_select", {0, 2, 1}},
      {"aten::index_add_", {0, 2, 1}},
      {"aten::index_copy_", {0, 2, 1}},
      {"aten::_embedding_bag", {0, 1, std::nullopt}},
      {"aten::_embedding_bag_forward_only", {0, 1, std::nullopt}},
  };
  const auto found = known.find(name.name);
  return found == known.end() ? std::nullopt : std::optional(found->second);
}

OperatorInfo read(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  OperatorInfo info(schema.operator_name());
  bool takes_generator = false;
  for (const c10::Argument& argument : schema.arguments()) {
    OperatorInfo::Argument read;
    read.kind = kind_of(argument.type());
    read.written = (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) ||
                   writes_unsaid(schema.name(), argument.name());
    read.may_be_cpu = may_be_cpu(schema.name(), argument.name());
    // Kernels accept a 0-dim CPU tensor as a number, except for written arguments and indices.
    read.may_be_number = !read.written && argument.name() != "index";
    takes_generator = takes_generator || read.kind == ArgumentKind::kGenerator;
    info.arguments.push_back(read);
  }
  info.returns = schema.returns().size();
  info.is_view = std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
  const auto tags = op.getTags();
  info.draws_by_default =
      !takes_generator && std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
  if (schema.name() == "aten::_pack_padded_sequence") {
    info.cpu_returns = 1u << 1; // batch_sizes
  } else if (schema.name() == "aten::_nested_tensor_size" || schema.name() == "aten::_nested_tensor_strides" ||
             schema.name() == "aten::_nested_tensor_storage_offsets") {
    info.cpu_returns = 1u;
  }
  info.rows = rows_of(info.name);
  return info;
}

/// Thread-safe. The reference stays valid forever.
const OperatorInfo& operator_info(const c10::OperatorHandle& op) {
  // Keyed by the schema's address. The name is compared too, because a deregistered operator's address may be reused
  // (by a torch.library in a test). The map is per thread, so it needs no lock. Infos are leaked, because kernels run
  // at exit.
  thread_local std::unordered_map<const c10::FunctionSchema*, const OperatorInfo*> known;
  const OperatorInfo*& info = known[&op.schema()];
  if (info == nullptr || info->name != op.operator_name()) {
    info = new OperatorInfo(read(op));
  }
  return *info;
}

// --- arguments and results

constexpr std::size_t kManyRows = 1 << 20; // bytes; below, reading the index costs more than it saves

/// For an operator that uses only some rows of a large tensor: replaces the tensor's access by accesses to the rows,
/// each once, with adjacent ones merged. Not if a row is out of range: the kernel will raise.
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
      table.dim() == 0 || !index.is_contiguous() || !c10::isIntegralType(index.scalar_type(), /*includeBool=*/false)) {
    return;
  }
  const Touch all = access_of(table, info.arguments[rows.tensor].written);
  auto* const access =
      std::ranges::find_if(accesses, [&](const Touch& one) { return one.ptr == all.ptr && one.bytes == all.bytes; });
  if (all.bytes <= kManyRows || access == accesses.end()) {
    return;
  }
  runtime().wait_in_kernel(stream); // a pending copy may still write the index
  const at::Tensor numbers = index.to(c10::kLong);
  std::vector<std::int64_t> wanted(numbers.const_data_ptr<std::int64_t>(),
                                   numbers.const_data_ptr<std::int64_t>() + numbers.numel());
  std::ranges::sort(wanted);
  if (!wanted.empty() && (wanted.front() < 0 || wanted.back() >= table.size(0))) {
    return;
  }
  accesses.erase(access);
  const std::size_t stride = static_cast<std::size_t>(table.stride(0)) * table.itemsize();
  const std::size_t row_bytes = all.bytes - static_cast<std::size_t>(table.size(0) - 1) * stride;
  for (auto row = wanted.begin(); row != wanted.end();) {
    const std::int64_t first = *row;
    std::int64_t last = first;
    for (; row != wanted.end() && *row <= last + 1; ++row) {
      last = *row;
    }
    accesses.push_back({static_cast<const char*>(all.ptr) + static_cast<std::size_t>(first) * stride,
                        static_cast<std::size_t>(last - first) * stride + row_bytes, all.write});
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
      const AllocationScope ordinary(kOrdinary);
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
