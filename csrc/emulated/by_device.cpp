// Operators that PyTorch implements by device, where a PrivateUse1 device needs another implementation than the CPU's
// kernel of that name.
#include <ATen/TensorOperators.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include <optional>
#include <tuple>
#include <vector>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/operands.h"

namespace torch_uvm::emulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// --- cells of LSTM and GRU layers: PyTorch's layers call them as fused kernels on every accelerator; the CPU has none.
// They are composed of differentiable operators, so autograd, double backward and vmap need no further kernels.

Tensor with_bias(const Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

/// \return the hidden state, the cell state, and what CUDA's kernel keeps for its backward, which is not used here
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const Tensor gates = with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias);
  const std::vector<Tensor> gate = gates.chunk(4, 1);
  const Tensor next = gate[1].sigmoid() * cell + gate[0].sigmoid() * gate[2].tanh();
  return {gate[3].sigmoid() * next.tanh(), next, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const std::vector<Tensor> now = with_bias(input_gates, input_bias).chunk(3, 1);
  const Tensor products = with_bias(hidden_gates, hidden_bias);
  const std::vector<Tensor> before = products.chunk(3, 1);
  const Tensor reset = (before[0] + now[0]).sigmoid();
  const Tensor update = (before[1] + now[1]).sigmoid();
  const Tensor candidate = (now[2] + before[2] * reset).tanh();
  return {(hidden - candidate) * update + candidate, products};
}

// --- dropout as on the CPU: PyTorch uses the fused native_dropout for every PrivateUse1 device. Its roundings come in
// another order, so in low precisions its results differ from the CPU's in the last bit.

Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  Tensor kept = at::empty_like(input);
  kept.bernoulli_(1 - p);
  kept.div_(1 - p);
  return input.mul(kept);
}

// --- attention: scaled_dot_product_attention asks each backend which of its kernels to use. The accelerator forwards
// the question to the CPU, whose flash kernel then runs through the fallback.

std::int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const MaybeTensor& mask,
                    double dropout, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  Operands operands(query.device().index());
  const auto to_cpu = [&](const Tensor& tensor) {
    Tensor cpu = is_ours(tensor) ? operands.to_cpu(tensor, false) : tensor;
    // The choice depends on requires_grad.
    return cpu.set_requires_grad(tensor.requires_grad());
  };
  const MaybeTensor cpu_mask = mask && mask->defined() ? std::optional(to_cpu(*mask)) : mask;
  return at::_fused_sdp_choice(to_cpu(query), to_cpu(key), to_cpu(value), cpu_mask, dropout, is_causal, scale,
                               enable_gqa);
}

// --- histograms of integers, which CUDA supports and the CPU does not. Programs that avoid them on the CPU test for
// the device type "cpu", so they use them on every other device.

/// Computes integers as doubles, which are exact up to 2^53. The counts have the operand's dtype.
Tensor histc(const Tensor& self, std::int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (c10::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    return at::histc(self.to(c10::kDouble), bins, min, max).to(self.scalar_type());
  }
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  torch::jit::Stack stack{self, bins, min, max};
  cpu_kernel_fallback<c10::DispatchKey::CPU>(op, &stack);
  return stack.back().toTensor();
}

Tensor& histc_out(const Tensor& self, std::int64_t bins, const at::Scalar& min, const at::Scalar& max, Tensor& out) {
  const Tensor counts = at::histc(self, bins, min, max);
  TORCH_CHECK(out.scalar_type() == counts.scalar_type(), "histc of ", self.scalar_type(), " with an out of ",
              out.scalar_type(), "; accepted: the same dtype");
  return out.resize_(counts.sizes()).copy_(counts);
}

} // namespace

void register_by_device(torch::Library& autograd, torch::Library& aten) {
  for (torch::Library* const library : {&autograd, &aten}) { // inference mode skips the autograd key
    library->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    library->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
    library->impl("dropout", TORCH_FN(dropout));
  }
  aten.impl("_fused_sdp_choice", TORCH_FN(choose));
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose);
  aten.impl("histc", TORCH_FN(histc));
  aten.impl("histc.out", TORCH_FN(histc_out));
}

} // namespace torch_uvm::emulated
