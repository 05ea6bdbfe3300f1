#include "residency/policy/trial.h"

#include <algorithm>
#include <limits>
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
  shortest_ms_.assign(candidates_.size(), std::numeric_limits<double>::infinity());
  left_.clear();
  for (std::size_t each = 0; candidates_.size() > 1 && each < candidates_.size(); ++each) {
    left_.push_back(each);
  }
  measured_.clear();
  again_ = false;
  current_ = 0;
  first_measured_ = begun_ + 1 + kSettling;
}

std::uint64_t Trial::begin_iteration() {
  return ++begun_;
}

bool Trial::took(std::uint64_t iteration, double ms) {
  if (!is_running() || iteration < first_measured_) {
    return false;
  }
  measured_.push_back(ms);
  if (measured_.size() < kMeasured) {
    return false;
  }
  std::ranges::sort(measured_);
  shortest_ms_[current_] = std::min(shortest_ms_[current_], measured_[kMeasured / 2]);
  measured_.clear();
  left_.erase(left_.begin());
  if (left_.empty() && !std::exchange(again_, true)) {
    left_ = close();
  }
  first_measured_ = begun_ + 1 + kSettling;
  const std::size_t before = std::exchange(current_, left_.empty() ? fastest() : left_.front());
  return current_ != before;
}

std::size_t Trial::fastest() const {
  return static_cast<std::size_t>(std::ranges::min_element(shortest_ms_) - shortest_ms_.begin());
}

std::vector<std::size_t> Trial::close() const {
  std::vector<std::size_t> found;
  for (std::size_t each = 0; each < shortest_ms_.size(); ++each) {
    if (shortest_ms_[each] <= kClose * shortest_ms_[fastest()]) {
      found.push_back(each);
    }
  }
  return found.size() > 1 ? found : std::vector<std::size_t>();
}

} // namespace torch_uvm::scheduling
