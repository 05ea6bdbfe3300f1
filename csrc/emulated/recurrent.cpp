// LSTM, GRU and plain recurrent layers.
//
// PyTorch's composite operators choose an implementation by device. On the CPU these are oneDNN's LSTM layers, or cells
// with one product of the input weights and the whole sequence. On a PrivateUse1 device they are fused cells, which
// have no CPU kernel.
//
// So the layers are composed here, of the same operators in the same order as on the CPU. Results and gradients equal
// the CPU's to the last bit. Each operator is dispatched with the accelerator's tensors, so autograd saves tensors that
// the residency engine tracks, and double backward and vmap work as on the CPU.
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/RNN.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "emulated/kernels.h"
#include "emulated/recurrent_layers.h"

namespace torch_uvm::emulated {
namespace {

using at::Tensor;
using at::TensorList;
using recurrent::Cell;
using recurrent::Layers;
using recurrent::Packed;
using recurrent::Padded;
using recurrent::State;
using recurrent::Weights;

std::vector<Weights> gather(TensorList params, bool has_biases, bool has_projections) {
  const std::size_t each = (has_biases ? 4U : 2U) + (has_projections ? 1U : 0U);
  TORCH_CHECK(params.size() % each == 0, "got an incorrect number of RNN parameters");
  std::vector<Weights> weights;
  for (std::size_t i = 0; i < params.size(); i += each) {
    weights.push_back({params[i], params[i + 1], has_biases ? params[i + 2] : Tensor(),
                       has_biases ? params[i + 3] : Tensor(), has_projections ? params[i + each - 1] : Tensor()});
  }
  return weights;
}

std::span<const std::int64_t> sizes_of(const Tensor& batch_sizes) {
  TORCH_CHECK(batch_sizes.device().is_cpu() && batch_sizes.scalar_type() == at::kLong && batch_sizes.dim() == 1 &&
                  batch_sizes.is_contiguous() && batch_sizes.numel() != 0,
              "batch_sizes of a packed sequence should be a contiguous 1-D CPU int64 tensor with elements, but got ",
              batch_sizes.toString(), " of sizes ", batch_sizes.sizes());
  return {batch_sizes.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(batch_sizes.numel())};
}

/// Splits (layers * directions, N, H) into the states of each layer and direction.
std::vector<State> split(const Tensor& h, const Tensor& c = {}) {
  std::vector<State> states;
  for (Tensor& part : h.unbind(0)) {
    states.push_back({std::move(part), {}});
  }
  if (c.defined()) {
    std::vector<Tensor> parts = c.unbind(0);
    TORCH_CHECK(parts.size() == states.size(), "Expected as many cell states as hidden states");
    for (std::size_t i = 0; i < parts.size(); ++i) {
      states[i].c = std::move(parts[i]);
    }
  }
  return states;
}

Tensor stack(const std::vector<State>& states, Tensor State::* part) {
  std::vector<Tensor> parts;
  for (const State& state : states) {
    parts.push_back(state.*part);
  }
  return at::stack(parts, 0);
}

// --- LSTM

void check_lstm_states(const Tensor& input, TensorList hx, TensorList params, const Layers& layers) {
  TORCH_CHECK(hx.size() == 2, "lstm expects two hidden states");
  at::native::check_attributes(input, params, hx);
  const std::int64_t expected = layers.count * (layers.bidirectional ? 2 : 1);
  for (const std::size_t i : {0, 1}) {
    TORCH_CHECK(hx[i].dim() == 3 && hx[i].size(0) == expected, "Expected ", i == 0 ? "h_0" : "c_0",
                " of an LSTM to be 3-D with size(0) ", expected, " (num_layers * num_directions), but got sizes ",
                hx[i].sizes());
  }
}

/// A constant that the CPU tells by an operator of oneDNN's namespace.
bool onednn_supports(const char* question) {
  const auto op = c10::Dispatcher::singleton().findSchema({question, ""});
  return op && op->typed<bool()>().call();
}

/// Whether the CPU uses oneDNN's layer for these operands.
bool onednn_has_layer_for(const Tensor& input, TensorList hx) {
  const at::Context& context = at::globalContext();
  if (!at::Context::hasMKLDNN() || !context.userEnabledMkldnn() || input.sym_numel() == 0 ||
      hx[0].sym_size(2) != hx[1].sym_size(2) || hx[0].unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return false;
  }
  switch (input.scalar_type()) {
    case at::kFloat:
      return true;
    case at::kBFloat16: {
      static const bool supported = onednn_supports("mkldnn::_is_mkldnn_bf16_supported");
      return supported;
    }
    case at::kHalf: {
      static const bool supported = onednn_supports("mkldnn::_is_mkldnn_fp16_supported");
      return supported && !at::GradMode::is_enabled();
    }
    default:
      return false;
  }
}

/// Runs one oneDNN layer for each direction of each layer.
std::tuple<Tensor, Tensor, Tensor> run_onednn_lstm(const Tensor& input, TensorList hx,
                                                   const std::vector<Weights>& weights, const Layers& layers,
                                                   bool batch_first) {
  constexpr std::int64_t kLstm = 2; // oneDNN's number of the cell type, as PyTorch passes it
  const std::size_t directions = layers.bidirectional ? 2 : 1;
  const auto bias_or_zeros = [](const Tensor& bias, const Tensor& weight) {
    return bias.defined() ? bias : at::zeros(weight.sizes(), weight.options()); // not read
  };
  Tensor sequence = (batch_first ? input.transpose(0, 1) : input).contiguous();
  const Tensor h = hx[0].contiguous();
  const Tensor c = hx[1].contiguous();
  TORCH_CHECK(weights.size() == static_cast<std::size_t>(h.size(0)), "Expected weights for ", h.size(0),
              " layers and directions of an LSTM, but got ", weights.size());
  std::vector<State> last;
  for (std::size_t i = 0; i < weights.size(); i += directions) {
    std::vector<Tensor> outputs;
    for (std::size_t direction = 0; direction < directions; ++direction) {
      const Weights& own = weights[i + direction];
      const auto index = static_cast<std::int64_t>(i + direction);
      const Tensor first_h = h[index];
      const Tensor first_c = c[index];
      auto [output, last_h, last_c, workspace] = at::mkldnn_rnn_layer(
          sequence, own.input, own.hidden, bias_or_zeros(own.input_bias, own.input),
          bias_or_zeros(own.hidden_bias, own.hidden), first_h, first_c, /*reverse=*/direction == 1, /*batch_sizes=*/{},
          kLstm, h.size(2), layers.count, own.input_bias.defined(), layers.bidirectional, batch_first, layers.train);
      outputs.push_back(std::move(output));
      last.push_back({std::move(last_h), std::move(last_c)});
    }
    sequence = directions == 1 ? outputs[0] : at::cat(outputs, -1);
    if (layers.dropout != 0 && layers.train && i + directions < weights.size()) {
      sequence = at::dropout(sequence, layers.dropout, /*train=*/true);
    }
  }
  Tensor last_h = stack(last, &State::h);
  Tensor last_c = stack(last, &State::c);
  return {batch_first ? sequence.transpose(0, 1) : sequence, std::move(last_h), std::move(last_c)};
}

template <class Sequence>
std::tuple<Tensor, Tensor, Tensor> run_lstm(Sequence sequence, TensorList hx, TensorList params, bool has_biases,
                                            const Layers& layers) {
  const bool projected = hx[0].sym_size(2) != hx[1].sym_size(2);
  const std::vector<Weights> weights = gather(params, has_biases, projected);
  std::vector<State> states = split(hx[0], hx[1]);
  Tensor outputs = recurrent::run_layers(Cell::kLstm, std::move(sequence), states, weights, layers);
  return {std::move(outputs), stack(states, &State::h), stack(states, &State::c)};
}

std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& input, TensorList hx, TensorList params, bool has_biases,
                                        std::int64_t count, double dropout, bool train, bool bidirectional,
                                        bool batch_first) {
  const Layers layers{count, dropout, train, bidirectional};
  check_lstm_states(input, hx, params, layers);
  if (onednn_has_layer_for(input, hx)) {
    return run_onednn_lstm(input, hx, gather(params, has_biases, /*has_projections=*/false), layers, batch_first);
  }
  auto result = run_lstm(Padded{batch_first ? input.transpose(0, 1) : input}, hx, params, has_biases, layers);
  if (batch_first) {
    std::get<0>(result) = std::get<0>(result).transpose(0, 1);
  }
  return result;
}

std::tuple<Tensor, Tensor, Tensor> packed_lstm(const Tensor& data, const Tensor& batch_sizes, TensorList hx,
                                               TensorList params, bool has_biases, std::int64_t count, double dropout,
                                               bool train, bool bidirectional) {
  const Layers layers{count, dropout, train, bidirectional};
  check_lstm_states(data, hx, params, layers);
  return run_lstm(Packed{data, sizes_of(batch_sizes)}, hx, params, has_biases, layers);
}

// --- GRU, tanh and ReLU

template <Cell cell>
std::tuple<Tensor, Tensor> padded(const Tensor& input, const Tensor& hx, TensorList params, bool has_biases,
                                  std::int64_t count, double dropout, bool train, bool bidirectional,
                                  bool batch_first) {
  at::native::check_attributes(input, params, hx);
  const Padded sequence{batch_first ? input.transpose(0, 1) : input};
  const std::vector<Weights> weights = gather(params, has_biases, /*has_projections=*/false);
  std::vector<State> states = split(hx);
  Tensor outputs = recurrent::run_layers(cell, sequence, states, weights, {count, dropout, train, bidirectional});
  Tensor last = stack(states, &State::h);
  if (batch_first) {
    outputs.transpose_(0, 1);
  }
  return {std::move(outputs), std::move(last)};
}

template <Cell cell>
std::tuple<Tensor, Tensor> packed(const Tensor& data, const Tensor& batch_sizes, const Tensor& hx, TensorList params,
                                  bool has_biases, std::int64_t count, double dropout, bool train, bool bidirectional) {
  at::native::check_attributes(data, params, hx);
  const std::vector<Weights> weights = gather(params, has_biases, /*has_projections=*/false);
  std::vector<State> states = split(hx);
  Tensor outputs = recurrent::run_layers(cell, Packed{data, sizes_of(batch_sizes)}, states, weights,
                                         {count, dropout, train, bidirectional});
  return {std::move(outputs), stack(states, &State::h)};
}

// --- Single cells

using MaybeTensor = std::optional<Tensor>;

/// Checks the devices before the shapes, as CUDA's fused cells do.
Weights checked_cell(std::int64_t gates, const Tensor& input, TensorList hidden, const Tensor& input_weight,
                     const Tensor& hidden_weight, const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  Weights weights{input_weight, hidden_weight, input_bias.value_or(Tensor()), hidden_bias.value_or(Tensor()), {}};
  const auto check_device = [&](const Tensor& other) {
    TORCH_CHECK(!other.defined() || other.device() == input.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", input.device(),
                " and ", other.device(), "! (in a recurrent cell)");
  };
  std::ranges::for_each(hidden, check_device);
  for (const Tensor* const weight : {&weights.input, &weights.hidden, &weights.input_bias, &weights.hidden_bias}) {
    check_device(*weight);
  }
  const c10::SymInt size = hidden_weight.sym_size(1);
  TORCH_CHECK(input.sym_size(1) == input_weight.sym_size(1), "input has inconsistent input_size: got ",
              input.sym_size(1), " expected ", input_weight.sym_size(1));
  for (const auto& [name, weight] : {std::pair("weight_ih", &input_weight), std::pair("weight_hh", &hidden_weight)}) {
    TORCH_CHECK(weight->sym_size(0) == gates * size, name, " first dim must be ", gates,
                " * hidden_size = ", gates * size, ", but got ", weight->sym_size(0));
  }
  for (std::size_t i = 0; i < hidden.size(); ++i) {
    TORCH_CHECK(input.sym_size(0) == hidden[i].sym_size(0), "Input batch size ", input.sym_size(0),
                " doesn't match hidden", i, " batch size ", hidden[i].sym_size(0));
    TORCH_CHECK(hidden[i].sym_size(1) == size, "hidden", i, " has inconsistent hidden_size: got ",
                hidden[i].sym_size(1), ", expected ", size);
  }
  return weights;
}

std::tuple<Tensor, Tensor> lstm_cell(const Tensor& input, TensorList hx, const Tensor& input_weight,
                                     const Tensor& hidden_weight, const MaybeTensor& input_bias,
                                     const MaybeTensor& hidden_bias) {
  TORCH_CHECK(hx.size() == 2, "lstm_cell expects two hidden states");
  const Weights weights = checked_cell(4, input, hx, input_weight, hidden_weight, input_bias, hidden_bias);
  State state = recurrent::step(Cell::kLstm, input, /*multiplied=*/false, {hx[0], hx[1]}, weights);
  return {std::move(state.h), std::move(state.c)};
}

template <Cell cell>
Tensor single_cell(const Tensor& input, const Tensor& hx, const Tensor& input_weight, const Tensor& hidden_weight,
                   const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const Weights weights =
      checked_cell(cell == Cell::kGru ? 3 : 1, input, hx, input_weight, hidden_weight, input_bias, hidden_bias);
  return recurrent::step(cell, input, /*multiplied=*/false, {hx, {}}, weights).h;
}

} // namespace

void register_recurrent(torch::Library& autograd, torch::Library& aten) {
  for (torch::Library* const library : {&autograd, &aten}) { // inference mode skips the autograd key
    library->impl("lstm.input", TORCH_FN(lstm));
    library->impl("lstm.data", TORCH_FN(packed_lstm));
    library->impl("lstm_cell", TORCH_FN(lstm_cell));
    library->impl("gru.input", TORCH_FN(padded<Cell::kGru>));
    library->impl("gru.data", TORCH_FN(packed<Cell::kGru>));
    library->impl("gru_cell", TORCH_FN(single_cell<Cell::kGru>));
    library->impl("rnn_tanh.input", TORCH_FN(padded<Cell::kTanh>));
    library->impl("rnn_tanh.data", TORCH_FN(packed<Cell::kTanh>));
    library->impl("rnn_tanh_cell", TORCH_FN(single_cell<Cell::kTanh>));
    library->impl("rnn_relu.input", TORCH_FN(padded<Cell::kRelu>));
    library->impl("rnn_relu.data", TORCH_FN(packed<Cell::kRelu>));
    library->impl("rnn_relu_cell", TORCH_FN(single_cell<Cell::kRelu>));
  }
}

} // namespace torch_uvm::emulated
