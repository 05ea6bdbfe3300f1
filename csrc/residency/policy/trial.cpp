#include "residency/policy/trial.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace torch_uvm::scheduling {

void Trial::start(std::vector<Decisions> candidates) {
  candidates_.clear();
  for (Decisions& candidate : candidates) {
    const bool is_first = candidates_.empty();
    const bool is_known = std::ranges::any_of(candidates_, [&](const Decisions& other) {
      return other.evicted_after == candidate.evicted_after && other.in_place == candidate.in_place;
    });
    if (is_first || (!is_known && candidate.predicted_ms <= kWorthATrial * candidates_.front().predicted_ms)) {
      candidates_.push_back(std::move(candidate));
    }
  }
  medians_.clear();
  measured_.clear();
  current_ = 0;
  running_ = candidates_.size() > 1;
  first_measured_ = begun_ + 1 + kSettling;
}

std::uint64_t Trial::begin_iteration() {
  return ++begun_;
}

bool Trial::took(std::uint64_t iteration, double ms) {
  if (!running_ || iteration < first_measured_) {
    return false;
  }
  measured_.push_back(ms);
  if (measured_.size() < kMeasured) {
    return false;
  }
  std::ranges::sort(measured_);
  medians_.push_back(measured_[measured_.size() / 2]);
  measured_.clear();
  const std::size_t before = current_;
  if (medians_.size() < candidates_.size()) {
    ++current_;
    first_measured_ = begun_ + 1 + kSettling;
  } else {
    current_ = static_cast<std::size_t>(std::ranges::min_element(medians_) - medians_.begin());
    running_ = false;
  }
  return current_ != before;
}

} // namespace torch_uvm::scheduling
