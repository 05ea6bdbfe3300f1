// Options, models and counters for tests of the residency policy in the simulator.
#pragma once

#include <cstdint>
#include <string>

#include "harness.h"
#include "residency_traces.h"

namespace simulator {

inline PolicyOptions with_budget(std::size_t budget, std::size_t reserve = 0) {
  PolicyOptions options;
  options.budget = budget;
  options.reserve = reserve;
  return options;
}

inline std::size_t lasting_bytes(const Transformer& model) {
  std::size_t sum = 0;
  for (const Transformer::Product& product : Transformer::products()) {
    sum += 3 * static_cast<std::size_t>(model.layers) * model.weight(product.wide);
  }
  return sum;
}

inline std::size_t peak_of(const Transformer& model) {
  return simulator::peak_of(model.step(), lasting_bytes(model));
}

inline Transformer small(const std::string& prefix = "") {
  Transformer model;
  model.layers = 6;
  model.tokens = 4096;
  model.prefix = prefix;
  return model;
}

struct Hits {
  std::uint64_t hits, misses;
};

/// Counts the schedule's hits and misses since the last call.
class HitCounter {
 public:
  explicit HitCounter(Policy& policy) : policy_(policy) {}
  Hits take() {
    const Policy::Counters now = policy_.counters();
    const Hits since{now.plan_hits - last_.plan_hits, now.plan_misses - last_.plan_misses};
    last_ = now;
    return since;
  }

 private:
  Policy& policy_;
  Policy::Counters last_;
};

} // namespace simulator
