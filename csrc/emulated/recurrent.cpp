// The cells of LSTM and GRU layers. PyTorch's layers call them as fused kernels on every accelerator; the CPU has none.
// They are composed of differentiable operators, so autograd, double backward and vmap need no further kernels.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "emulated/kernels.h"

namespace torch_uvm::emulated {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

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

} // namespace

void register_recurrent(torch::Library& autograd, torch::Library& aten) {
  for (torch::Library* const library : {&autograd, &aten}) { // inference mode skips the autograd key
    library->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
    library->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  }
}

} // namespace torch_uvm::emulated
