// Residency over modelled time, in bounded memory.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/emulated/model.h"

namespace torch_uvm::emulated {

/// The samples of one device. A point holds the maxima of `stride_` consecutive samples and the time of the first. At
/// kMaxPoints points, adjacent ones are merged and the stride doubles.
class Timeline {
 public:
  static constexpr std::size_t kMaxPoints = 4096;

  void add(const ResidencySample& sample);
  void clear();
  const std::vector<ResidencySample>& points() const {
    return points_;
  }

 private:
  std::vector<ResidencySample> points_;
  std::size_t stride_ = 1;
  std::size_t in_last_ = 0; ///< samples in the last point so far
};

} // namespace torch_uvm::emulated
