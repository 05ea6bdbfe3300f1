// scaled_dot_product_attention asks each backend which of its kernels to use. The accelerator forwards the question to
// the CPU, whose flash kernel then runs through the fallback.
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>

#include <optional>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/operands.h"

namespace torch_uvm::emulated {
namespace {

std::int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale,
                    bool enable_gqa) {
  Operands operands(query.device().index());
  const auto to_cpu = [&](const at::Tensor& tensor) {
    at::Tensor cpu = is_ours(tensor) ? operands.to_cpu(tensor, false) : tensor;
    // The choice depends on requires_grad.
    return cpu.set_requires_grad(tensor.requires_grad());
  };
  const std::optional<at::Tensor> cpu_mask = mask && mask->defined() ? std::optional(to_cpu(*mask)) : mask;
  return at::_fused_sdp_choice(to_cpu(query), to_cpu(key), to_cpu(value), cpu_mask, dropout, is_causal, scale,
                               enable_gqa);
}

} // namespace

void register_attention(torch::Library& aten) {
  aten.impl("_fused_sdp_choice", TORCH_FN(choose));
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
}

} // namespace torch_uvm::emulated
