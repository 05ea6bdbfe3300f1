// Residency over modelled time, in bounded memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "runtime/emulated/model.h"

namespace torch_uvm::emulated {

/// The samples of one device. A point holds the maxima of `stride_` consecutive samples and the time of the first. At
/// kMaxPoints points, adjacent ones are merged and the stride doubles.
class Timeline {
 public:
  static constexpr std::size_t kMaxPoints = 4096;

  void add(const ResidencySample& sample) {
    if (!points_.empty() && in_last_ < stride_) {
      merge(points_.back(), sample);
      ++in_last_;
      return;
    }
    if (points_.size() == kMaxPoints) {
      for (std::size_t i = 0; i < kMaxPoints / 2; ++i) {
        points_[i] = points_[2 * i];
        merge(points_[i], points_[2 * i + 1]);
      }
      points_.resize(kMaxPoints / 2);
      stride_ *= 2;
    }
    // Each stream has its own clock; clamped, so that the timeline is monotonic.
    const double earliest = points_.empty() ? sample.time_us : points_.back().time_us;
    points_.push_back(sample);
    points_.back().time_us = std::max(sample.time_us, earliest);
    in_last_ = 1;
  }
  const std::vector<ResidencySample>& points() const {
    return points_;
  }

 private:
  static void merge(ResidencySample& into, const ResidencySample& later) {
    into.device_bytes = std::max(into.device_bytes, later.device_bytes);
    into.plain_bytes = std::max(into.plain_bytes, later.plain_bytes);
    into.managed_bytes = std::max(into.managed_bytes, later.managed_bytes);
  }

  std::vector<ResidencySample> points_;
  std::size_t stride_ = 1;
  std::size_t in_last_ = 0; ///< samples in the last point so far
};

} // namespace torch_uvm::emulated
