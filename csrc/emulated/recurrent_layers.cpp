#include "emulated/recurrent_layers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tanh.h>

#include <algorithm>
#include <utility>

namespace torch_uvm::emulated::recurrent {
namespace {

Tensor input_products(const Tensor& input, const Weights& weights) {
  return at::linear(input, weights.input, weights.input_bias);
}

State slice(const State& state, std::int64_t begin, std::int64_t end) {
  return {state.h.narrow(0, begin, end - begin), state.c.defined() ? state.c.narrow(0, begin, end - begin) : Tensor()};
}

State concatenate(const std::vector<State>& parts) {
  std::vector<Tensor> h;
  std::vector<Tensor> c;
  for (const State& part : parts) {
    h.push_back(part.h);
    if (part.c.defined()) {
      c.push_back(part.c);
    }
  }
  return {at::cat(h, 0), c.empty() ? Tensor() : at::cat(c, 0)};
}

template <class Sequence>
Tensor run(Cell cell, Sequence sequence, std::vector<State>& states, const std::vector<Weights>& weights,
           const Layers& layers) {
  const std::size_t directions = layers.bidirectional ? 2 : 1;
  const std::size_t passes = static_cast<std::size_t>(layers.count) * directions;
  TORCH_CHECK(passes == states.size(), "Expected ", passes, " hidden states in a stacked RNN, but got ", states.size());
  TORCH_CHECK(passes == weights.size(), "Expected weights for ", passes, " layers and directions of a stacked RNN, ",
              "but got ", weights.size());
  for (std::size_t i = 0; i < passes; i += directions) {
    Pass forwards = sequence.run(cell, states[i], weights[i], /*reverse=*/false);
    states[i] = std::move(forwards.last);
    Tensor outputs = std::move(forwards.outputs);
    if (layers.bidirectional) {
      Pass backwards = sequence.run(cell, states[i + 1], weights[i + 1], /*reverse=*/true);
      states[i + 1] = std::move(backwards.last);
      outputs = at::cat({outputs, backwards.outputs}, -1);
    }
    if (layers.dropout != 0 && layers.train && i + directions < passes) {
      outputs = at::dropout(outputs, layers.dropout, /*train=*/true);
    }
    sequence.data = std::move(outputs);
  }
  return sequence.data;
}

} // namespace

State step(Cell cell, const Tensor& input, bool multiplied, const State& state, const Weights& weights) {
  const auto from_input = [&] { return multiplied ? input : input_products(input, weights); };
  const auto from_hidden = [&] { return at::linear(state.h, weights.hidden, weights.hidden_bias); };
  if (cell == Cell::kGru) {
    const std::vector<Tensor> now = from_input().unsafe_chunk(3, 1);
    const std::vector<Tensor> before = from_hidden().unsafe_chunk(3, 1);
    const Tensor reset = before[0].add_(now[0]).sigmoid_();
    const Tensor update = before[1].add_(now[1]).sigmoid_();
    const Tensor candidate = now[2].add(before[2].mul_(reset)).tanh_();
    return {(state.h - candidate).mul_(update).add_(candidate), {}};
  }
  const Tensor gates = from_hidden();
  gates.add_(from_input());
  if (cell != Cell::kLstm) {
    return {cell == Cell::kTanh ? at::tanh(gates) : at::relu(gates), {}};
  }
  const std::vector<Tensor> gate = gates.unsafe_chunk(4, 1);
  const Tensor in = gate[0].sigmoid_();
  const Tensor forget = gate[1].sigmoid_();
  const Tensor candidate = gate[2].tanh_();
  const Tensor out = gate[3].sigmoid_();
  Tensor c = forget * state.c;
  c.add_(in * candidate);
  Tensor h = out * c.tanh();
  if (weights.projection.defined()) {
    h = at::matmul(h, weights.projection.t());
  }
  return {std::move(h), std::move(c)};
}

Pass Padded::run(Cell cell, const State& first, const Weights& weights, bool reverse) const {
  std::vector<Tensor> inputs = input_products(data, weights).unbind(0);
  TORCH_CHECK(!inputs.empty(), "Expected sequence length to be larger than 0 in RNN");
  if (reverse) {
    std::ranges::reverse(inputs);
  }
  State state = first;
  std::vector<Tensor> outputs;
  for (const Tensor& input : inputs) {
    state = step(cell, input, /*multiplied=*/true, state, weights);
    outputs.push_back(state.h);
  }
  if (reverse) {
    std::ranges::reverse(outputs);
  }
  return {at::stack(outputs, 0), state};
}

Pass Packed::run(Cell cell, const State& first, const Weights& weights, bool reverse) const {
  const Tensor products = input_products(data, weights);
  return reverse ? run_backwards(cell, products, first, weights) : run_forwards(cell, products, first, weights);
}

// `finished` collects the final states of rows that end; the shortest rows end first.
Pass Packed::run_forwards(Cell cell, const Tensor& products, const State& first, const Weights& weights) const {
  State state = first;
  std::vector<State> finished;
  std::vector<Tensor> outputs;
  std::int64_t offset = 0;
  std::int64_t rows = batch_sizes.front();
  for (const std::int64_t size : batch_sizes) {
    const Tensor input = products.narrow(0, offset, size);
    offset += size;
    if (size < rows) {
      finished.push_back(slice(state, size, rows));
      state = slice(state, 0, size);
      rows = size;
    }
    state = step(cell, input, /*multiplied=*/true, state, weights);
    outputs.push_back(state.h);
  }
  finished.push_back(state);
  std::ranges::reverse(finished);
  return {at::cat(outputs, 0), concatenate(finished)};
}

// Begins with the longest rows; shorter rows join at their last step, with their initial states.
Pass Packed::run_backwards(Cell cell, const Tensor& products, const State& first, const Weights& weights) const {
  std::int64_t offset = data.size(0);
  std::int64_t rows = batch_sizes.back();
  State state = slice(first, 0, rows);
  std::vector<Tensor> outputs;
  for (std::size_t i = batch_sizes.size(); i-- > 0;) {
    const std::int64_t size = batch_sizes[i];
    if (size > rows) {
      state = concatenate({state, slice(first, rows, size)});
      rows = size;
    }
    offset -= size;
    state = step(cell, products.narrow(0, offset, size), /*multiplied=*/true, state, weights);
    outputs.push_back(state.h);
  }
  std::ranges::reverse(outputs);
  return {at::cat(outputs, 0), state};
}

Tensor run_layers(Cell cell, Padded sequence, std::vector<State>& states, const std::vector<Weights>& weights,
                  const Layers& layers) {
  return run(cell, std::move(sequence), states, weights, layers);
}

Tensor run_layers(Cell cell, Packed sequence, std::vector<State>& states, const std::vector<Weights>& weights,
                  const Layers& layers) {
  return run(cell, std::move(sequence), states, weights, layers);
}

} // namespace torch_uvm::emulated::recurrent
