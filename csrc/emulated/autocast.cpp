// Autocast with the CPU's operator lists. The accelerator runs the CPU's kernels, so the same operators are safe in
// lower precision, and results under autocast equal the CPU's.
#include <ATen/autocast_mode.h>

#include <string>
#include <unordered_set>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/operands.h"

namespace torch_uvm::emulated {
namespace {

// The dispatcher knows which operators the CPU casts, but not to which dtype. PyTorch has three lists
// (aten/src/ATen/autocast_mode.cpp): the two short ones are repeated here, all other operators are cast to float32.
const std::unordered_set<std::string> cast_down = {"aten::conv1d",
                                                   "aten::conv2d",
                                                   "aten::conv3d",
                                                   "aten::bmm",
                                                   "aten::mm",
                                                   "aten::linalg_vecdot",
                                                   "aten::baddbmm",
                                                   "aten::addmm",
                                                   "aten::_addmm_activation",
                                                   "aten::addbmm",
                                                   "aten::linear",
                                                   "aten::_convolution",
                                                   "aten::matmul",
                                                   "aten::conv_tbc",
                                                   "aten::mkldnn_rnn_layer",
                                                   "aten::conv_transpose1d",
                                                   "aten::conv_transpose2d",
                                                   "aten::conv_transpose3d",
                                                   "aten::prelu",
                                                   "aten::scaled_dot_product_attention",
                                                   "aten::_native_multi_head_attention"};

const std::unordered_set<std::string> promoted = {"aten::stack", "aten::cat", "aten::index_copy"};

c10::ScalarType target_type(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
  const c10::ScalarType lower = at::autocast::get_lower_precision_fp_from_device_type(kDeviceType);
  if (cast_down.contains(name)) {
    return lower;
  }
  if (!promoted.contains(name)) {
    return c10::kFloat;
  }
  c10::ScalarType widest = lower;
  for (const c10::IValue& argument : arguments) {
    replaced(argument, [&](const at::Tensor& tensor) {
      widest = at::autocast::prioritize(widest, tensor, kDeviceType);
      return tensor;
    });
  }
  return widest;
}

void cast_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const std::size_t count = op.schema().arguments().size();
  const auto arguments = torch::jit::last(*stack, count);
  const c10::ScalarType type = target_type(op.schema().name(), arguments);
  for (std::size_t i = stack->size() - count; i < stack->size(); ++i) {
    (*stack)[i] = replaced(
        (*stack)[i], [&](const at::Tensor& tensor) { return at::autocast::cached_cast(type, tensor, kDeviceType); });
  }
  op.callBoxed(stack);
}

} // namespace

void register_autocast(torch::Library& autocast) {
  for_each_operator("aten::", c10::DispatchKey::AutocastCPU, [&](const c10::OperatorName& name, const auto& /*op*/) {
    autocast.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&cast_and_call>());
  });
}

} // namespace torch_uvm::emulated
