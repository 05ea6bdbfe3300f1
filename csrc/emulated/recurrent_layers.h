// Recurrent layers, composed of the same operators in the same order as on the CPU (see recurrent.cpp for why).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace torch_uvm::emulated::recurrent {

using at::Tensor;

enum class Cell : std::uint8_t { kTanh, kRelu, kGru, kLstm };

struct Weights {
  Tensor input, hidden;
  Tensor input_bias, hidden_bias; ///< undefined if the layer has none
  Tensor projection; ///< of an LSTM's output; undefined if it has none
};

struct State {
  Tensor h;
  Tensor c; ///< LSTM only
};

struct Layers {
  std::int64_t count;
  double dropout;
  bool train;
  bool bidirectional;
};

/// The result of one direction of a layer on a sequence.
struct Pass {
  Tensor outputs;
  State last;
};

/// A sequence of shape (T, N, ...): all N rows have T steps.
struct Padded {
  Tensor data;

  Pass run(Cell cell, const State& first, const Weights& weights, bool reverse) const;
};

/// A packed sequence: the rows of step 0, then the rows of step 1, and so on. Rows are sorted by decreasing length.
struct Packed {
  Tensor data;
  std::span<const std::int64_t> batch_sizes; ///< rows of each step; non-increasing, not empty

  Pass run(Cell cell, const State& first, const Weights& weights, bool reverse) const;

 private:
  Pass run_forwards(Cell cell, const Tensor& products, const State& first, const Weights& weights) const;
  Pass run_backwards(Cell cell, const Tensor& products, const State& first, const Weights& weights) const;
};

/// One step of a cell. \param multiplied `input` is already multiplied by the input weights
State step(Cell cell, const Tensor& input, bool multiplied, const State& state, const Weights& weights);

/// \return the last layer's outputs. \param states one for each direction of each layer; replaced by the final states
Tensor run_layers(Cell cell, Padded sequence, std::vector<State>& states, const std::vector<Weights>& weights,
                  const Layers& layers);
Tensor run_layers(Cell cell, Packed sequence, std::vector<State>& states, const std::vector<Weights>& weights,
                  const Layers& layers);

} // namespace torch_uvm::emulated::recurrent
