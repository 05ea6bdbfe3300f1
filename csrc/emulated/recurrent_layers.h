// How recurrent layers are composed of other operators: as on the CPU, in the same order (see recurrent.cpp).
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
  Tensor input_bias, hidden_bias; ///< undefined: none
  Tensor projection; ///< of an LSTM's output; undefined: none
};

struct State {
  Tensor h;
  Tensor c; ///< an LSTM's
};

struct Layers {
  std::int64_t count;
  double dropout;
  bool train;
  bool bidirectional;
};

/// What one direction of a layer makes of a sequence.
struct Pass {
  Tensor outputs;
  State last;
};

/// A sequence (T, N, ...) whose rows all have T steps.
struct Padded {
  Tensor data;

  Pass run(Cell cell, const State& first, const Weights& weights, bool reverse) const;
};

/// A packed sequence: the rows of step 0, then those of step 1, and so on. Rows are sorted by length, longest first.
struct Packed {
  Tensor data;
  std::span<const std::int64_t> batch_sizes; ///< rows of each step; never increasing; not empty

  Pass run(Cell cell, const State& first, const Weights& weights, bool reverse) const;

 private:
  Pass run_forwards(Cell cell, const Tensor& products, const State& first, const Weights& weights) const;
  Pass run_backwards(Cell cell, const Tensor& products, const State& first, const Weights& weights) const;
};

/// One step of a cell. \param multiplied `input` is its product with the weights already
State step(Cell cell, const Tensor& input, bool multiplied, const State& state, const Weights& weights);

/// \return the last layer's outputs. \param states one for each direction of each layer; replaced by the last ones
Tensor run_layers(Cell cell, Padded sequence, std::vector<State>& states, const std::vector<Weights>& weights,
                  const Layers& layers);
Tensor run_layers(Cell cell, Packed sequence, std::vector<State>& states, const std::vector<Weights>& weights,
                  const Layers& layers);

} // namespace torch_uvm::emulated::recurrent
