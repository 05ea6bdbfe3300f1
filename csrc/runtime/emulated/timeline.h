// Residency over modelled time, in bounded space.
#pragma once

#include <cstddef>
#include <vector>

#include "runtime/emulated/model.h"

namespace torch_uvm::emulated {

/// The samples of one device. Each point stands for `stride` samples in a row, with their maxima and the
/// time of the first; when there are too many points, neighbours are merged and the stride doubles.
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
  std::size_t in_last_ = 0; ///< samples that the last point stands for so far
};

} // namespace torch_uvm::emulated
