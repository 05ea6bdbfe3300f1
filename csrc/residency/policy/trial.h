// Chooses among the decisions for one iteration by the measured duration of iterations that follow them.
//
// Predictions rank candidates well, but know nothing of fragmented memory or of the host. So each candidate is followed
// for some iterations, and the fastest is kept. Other work on the host makes iterations longer, for a second at a time.
// So those that are close are followed again, and the shorter median of each counts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "residency/policy/schedule.h"

namespace torch_uvm::scheduling {

class Trial {
 public:
  static constexpr unsigned kSettling = 2; ///< iterations until storages are where a candidate has them
  static constexpr unsigned kMeasured = 3; ///< measured iterations of each candidate, each time it is followed
  /// Candidates with longer predictions than this, times the shortest one, are not tried.
  static constexpr double kWorthATrial = 1.5;
  /// Candidates are close up to this multiple of the shortest median.
  static constexpr double kClose = 1.25;

  /// Drops earlier candidates. \param candidates shortest prediction first; at least one
  void start(std::vector<Decisions> candidates);
  bool is_running() const {
    return !left_.empty();
  }
  /// What is tried, or was; shortest prediction first.
  const std::vector<Decisions>& candidates() const {
    return candidates_;
  }
  /// The candidate to follow. Requires `start`.
  const Decisions& current() const {
    return candidates_[current_];
  }
  /// An iteration of the current candidate begins.
  /// \return an identifier of the iteration, for `took`; never 0
  std::uint64_t begin_iteration();
  /// The duration of an iteration. Those of earlier candidates, and of iterations that settle, are ignored.
  /// \return whether another candidate is current now
  bool took(std::uint64_t iteration, double ms);

 private:
  std::size_t fastest() const;
  /// The candidates to follow again.
  std::vector<std::size_t> close() const;

  std::vector<Decisions> candidates_;
  std::vector<double> shortest_ms_; ///< by candidate, the shortest median so far
  std::vector<std::size_t> left_; ///< candidates to follow, the current one first
  std::vector<double> measured_; ///< of the current candidate
  bool again_ = false; ///< the close ones are followed again
  std::size_t current_ = 0;
  std::uint64_t begun_ = 0; ///< iterations
  std::uint64_t first_measured_ = 0; ///< the current candidate's first iteration to measure
};

} // namespace torch_uvm::scheduling
