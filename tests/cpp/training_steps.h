// Allocations like those of a training step: activations in stack order, workspaces between them, gradients passed from
// layer to layer, and lists of temporaries in the optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "allocator/plan/plan_layout.h"
#include "runtime/bytes.h"

namespace steps {

using namespace torch_uvm;

/// Collects requests while events are appended.
class Step {
 public:
  std::size_t allocate(std::size_t bytes, Stream stream = Stream::default_of(0)) {
    requests.push_back({bytes, events++, kNoEnd, stream});
    return requests.size() - 1;
  }
  void free(std::size_t which) {
    requests[which].end = events++;
  }
  void passing(std::size_t bytes) {
    free(allocate(bytes));
  }

  std::vector<PlanRequest> requests;
  std::uint32_t events = 0;
};

/// A chain of layers. Each has several operators that keep their saved tensors until their backward.
/// \param saved bytes of the tensors that each operator of each layer saves; the first one is its output
inline std::vector<PlanRequest> chain(const std::vector<std::vector<std::vector<std::size_t>>>& saved,
                                      std::uint64_t seed) {
  Step step;
  std::mt19937_64 random(seed);
  const auto workspace = [&](std::size_t near) { step.passing(near / 2 + random() % (near + 1)); };
  std::vector<std::vector<std::vector<std::size_t>>> kept;
  for (const auto& layer : saved) {
    kept.emplace_back();
    for (const auto& op : layer) {
      kept.back().emplace_back();
      if (random() % 3 == 0) {
        workspace(op.front());
      }
      for (const std::size_t bytes : op) {
        kept.back().back().push_back(step.allocate(bytes));
      }
      if (random() % 4 == 0) {
        step.passing(4 + random() % 2000); // a scalar or a shape
      }
    }
  }
  const std::size_t loss = step.allocate(4);
  std::size_t gradient = step.allocate(saved.back().back().front());
  for (std::size_t layer = saved.size(); layer-- > 0;) {
    for (std::size_t op = saved[layer].size(); op-- > 0;) {
      const bool first = layer == 0 && op == 0;
      const std::size_t before = first ? 0 : op > 0 ? saved[layer][op - 1].front() : saved[layer - 1].back().front();
      if (random() % 2 == 0) {
        workspace(saved[layer][op].front());
      }
      std::size_t next = gradient;
      if (!first) {
        next = step.allocate(before);
        if (random() % 5 == 0) { // two branches join: their gradients are added
          const std::size_t other = step.allocate(before);
          const std::size_t sum = step.allocate(before);
          step.free(next);
          step.free(other);
          next = sum;
        }
      }
      for (const std::size_t which : kept[layer][op]) {
        step.free(which);
      }
      if (!first) {
        step.free(gradient);
      }
      gradient = next;
    }
  }
  step.free(gradient);
  // the optimizer processes several parameters at a time
  for (std::size_t group = 0; group < saved.size() / 8 + 1; ++group) {
    std::vector<std::size_t> temporaries;
    for (int i = 0; i < 12; ++i) {
      temporaries.push_back(step.allocate(saved[group % saved.size()].front().front() / 8 + 1 + 512 * (random() % 64)));
    }
    for (const std::size_t which : temporaries) {
      step.free(which);
    }
  }
  step.free(loss);
  return step.requests;
}

inline std::vector<PlanRequest> transformer(std::size_t layers, std::size_t tokens = 4096, std::size_t width = 1024) {
  const std::size_t unit = 2 * tokens * width; // bfloat16
  const std::vector<std::vector<std::size_t>> layer = {{unit, 4 * tokens, 4 * tokens},
                                                       {3 * unit},
                                                       {unit, 4 * tokens * 16},
                                                       {unit},
                                                       {unit, unit / 2},
                                                       {unit, 4 * tokens, 4 * tokens},
                                                       {4 * unit},
                                                       {4 * unit},
                                                       {unit},
                                                       {unit, unit / 2}};
  return chain(std::vector(layers, layer), layers);
}

inline std::vector<PlanRequest> convolutional(std::size_t blocks, std::size_t batch = 32) {
  std::vector<std::vector<std::vector<std::size_t>>> saved;
  for (std::size_t block = 0; block < blocks; ++block) {
    const std::size_t stage = block * 4 / blocks;
    const std::size_t side = std::size_t{56} >> stage, channels = std::size_t{64} << stage;
    const std::size_t thin = 4 * batch * side * side * channels, wide = 4 * thin;
    saved.push_back({{thin},
                     {thin, 4 * channels, 4 * channels},
                     {thin / 4},
                     {thin},
                     {thin, 4 * channels, 4 * channels},
                     {thin / 4},
                     {wide},
                     {wide, 16 * channels, 16 * channels},
                     {wide}});
  }
  return chain(saved, blocks + 1);
}

/// Layers of different sizes: k * 16 * 7 * 7, k * 7 * 7, k * 7, k and k * 32 floats.
inline std::vector<PlanRequest> ragged(std::size_t layers) {
  std::mt19937_64 random(layers);
  std::vector<std::vector<std::vector<std::size_t>>> saved;
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const auto k = [&] { return 4 * (1024 + random() % 7168); };
    saved.push_back({{k() * 16 * 7 * 7}, {k() * 7 * 7, k() * 7}, {k() * 32, k()}, {k() * 16 * 7 * 7, k() * 7 * 7}});
  }
  return chain(saved, layers + 2);
}

/// An event of an iteration: a request begins or ends.
struct StepEvent {
  std::size_t request;
  bool allocates;
};

inline std::vector<StepEvent> events_of(const std::vector<PlanRequest>& requests) {
  std::vector<std::vector<StepEvent>> at; // indexed by time
  const auto put = [&](std::uint32_t when, StepEvent event) {
    if (at.size() <= when) {
      at.resize(when + 1);
    }
    at[when].push_back(event);
  };
  for (std::size_t i = 0; i < requests.size(); ++i) {
    put(requests[i].begin, {i, true});
    if (requests[i].end != kNoEnd) {
      put(requests[i].end, {i, false});
    }
  }
  std::vector<StepEvent> events;
  for (const auto& of_a_moment : at) {
    events.insert(events.end(), of_a_moment.begin(), of_a_moment.end());
  }
  return events;
}

} // namespace steps
