// scaled_dot_product_attention asks each backend which of its kernels to use. The accelerator forwards the question to
// the CPU, whose flash kernel then runs through the fallback.
//
// PyTorch has no derivative of the flash kernel's backward. For double backward (create_graph=True) the gradients are
// composed of differentiable operators. The CPU raises in that case, so there is no CPU result to match.
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/softmax.h>

#include <cmath>
#include <limits>
#include <optional>
#include <tuple>

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

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>; ///< of query, key, value

/// Operands have the shape (N, heads, length, width). With grouped-query attention key and value have fewer heads.
Gradients differentiable_backward(const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
                                  const at::Tensor& value, bool is_causal, const std::optional<at::Tensor>& mask,
                                  std::optional<double> scale) {
  constexpr double kMasked = -std::numeric_limits<double>::infinity();
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
  const std::int64_t shared = query.size(1) / key.size(1);
  const auto for_each_head = [&](const at::Tensor& tensor) {
    return shared == 1 ? tensor : tensor.repeat_interleave(shared, 1);
  };
  const auto sum_of_heads = [&](const at::Tensor& tensor) {
    return shared == 1 ? tensor : tensor.unflatten(1, {key.size(1), shared}).sum(2);
  };
  const at::Tensor keys = for_each_head(key);
  const at::Tensor values = for_each_head(value);
  at::Tensor scores = at::matmul(query, keys.transpose(-2, -1)) * factor;
  if (mask && mask->defined()) {
    scores = mask->scalar_type() == at::kBool ? scores.masked_fill(mask->logical_not(), kMasked) : scores + *mask;
  }
  if (is_causal) {
    const at::Tensor later = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).triu(1);
    scores = scores.masked_fill(later, kMasked);
  }
  const at::Tensor weights = at::softmax(scores, -1);
  const at::Tensor of_weights = at::matmul(gradient, values.transpose(-2, -1));
  const at::Tensor of_scores = weights * (of_weights - (of_weights * weights).sum(-1, /*keepdim=*/true)) * factor;
  return {at::matmul(of_scores, keys), sum_of_heads(at::matmul(of_scores.transpose(-2, -1), query)),
          sum_of_heads(at::matmul(weights.transpose(-2, -1), gradient))};
}

Gradients flash_backward(const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key,
                         const at::Tensor& value, const at::Tensor& out, const at::Tensor& logsumexp, double dropout,
                         bool is_causal, const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  const bool differentiated = at::GradMode::is_enabled() && (gradient.requires_grad() || query.requires_grad() ||
                                                             key.requires_grad() || value.requires_grad());
  if (differentiated) {
    return differentiable_backward(gradient, query, key, value, is_causal, mask, scale);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(gradient, query, key, value, out, logsumexp, dropout,
                                                                  is_causal, mask, scale);
}

} // namespace

void register_attention(torch::Library& autograd, torch::Library& aten) {
  autograd.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(flash_backward));
  aten.impl("_fused_sdp_choice", TORCH_FN(choose));
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
}

} // namespace torch_uvm::emulated
