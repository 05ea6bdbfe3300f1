#include "runtime/emulated/timeline.h"

#include <algorithm>

namespace torch_uvm::emulated {
namespace {

void merge(ResidencySample& into, const ResidencySample& later) {
  into.device_bytes = std::max(into.device_bytes, later.device_bytes);
  into.plain_bytes = std::max(into.plain_bytes, later.plain_bytes);
  into.managed_bytes = std::max(into.managed_bytes, later.managed_bytes);
}

} // namespace

void Timeline::add(const ResidencySample& sample) {
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
  points_.push_back(sample);
  // Each stream has its own clock; clamped, so that the timeline is monotonic.
  if (points_.size() > 1) {
    points_.back().time_us = std::max(sample.time_us, points_[points_.size() - 2].time_us);
  }
  in_last_ = 1;
}

void Timeline::clear() {
  points_.clear();
  stride_ = 1;
  in_last_ = 0;
}

} // namespace torch_uvm::emulated
