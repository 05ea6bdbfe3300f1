// Group normalisation in the operand's memory format, as on the CPU. For every other device PyTorch makes the input
// contiguous first, which loses channels_last.
#include <ATen/ops/native_group_norm.h>
#include <c10/core/SymIntArrayRef.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "emulated/kernels.h"

namespace torch_uvm::emulated {
namespace {

at::Tensor group_norm(const at::Tensor& input, std::int64_t groups, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, double eps, bool /*cudnn_enabled*/) {
  TORCH_CHECK(groups > 0, "Expected num groups to be greater than 0, got ", groups);
  TORCH_CHECK(input.dim() >= 2, "Expected at least 2 dimensions for input tensor of group_norm but received ",
              input.dim());
  const c10::SymInt channels = input.sym_size(1);
  TORCH_CHECK(channels % groups == 0, "Expected number of channels in input to be divisible by num_groups, but got ",
              "input of shape ", input.sym_sizes(), " and num_groups=", groups);
  const at::Tensor operand = input.contiguous(input.suggest_memory_format());
  const c10::SymInt plane = c10::multiply_integers(input.sym_sizes().slice(2));
  return std::get<0>(
      at::native_group_norm_symint(operand, weight, bias, input.sym_size(0), channels, plane, groups, eps));
}

} // namespace

void register_group_norm(torch::Library& autograd, torch::Library& aten) {
  for (torch::Library* const library : {&autograd, &aten}) { // inference mode skips the autograd key
    library->impl("group_norm", TORCH_FN(group_norm));
  }
}

} // namespace torch_uvm::emulated
