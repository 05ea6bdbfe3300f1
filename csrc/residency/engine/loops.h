// The loops that a program runs on one device, with a policy each: operators of two threads that train a model each
// come in any order together, and in the same order in each iteration of each thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "residency/policy/policy.h"
#include "residency/trace/operator_timer.h"

namespace torch_uvm {

/// Identifies a thread of the program; expires when it ends.
using Thread = std::shared_ptr<const void>;

/// One loop for each thread of the program. Threads that use the same storages in turn share one.
class Loops {
 public:
  struct Loop {
    Policy policy;
    std::unique_ptr<OperatorTimer>
        timer; ///< of single operators, which it reports to the policy; nullptr: none is timed
    std::size_t budget = 0; ///< that the policy plans for
    std::uint64_t operators = 0; ///< begun when the budget was last shared
  };

  /// Of operators in a backward whose operands no loop has used, if threads that are alive run several.
  static constexpr std::size_t kUnknown = 1;
  std::size_t unknown() const;

  bool empty() const {
    return loops_.empty();
  }
  std::size_t size() const {
    return loops_.size();
  }
  /// Makes the first loop, if there is none.
  void start();
  void set_options(const PolicyOptions& options);
  /// The loop of a thread. A new one continues a loop whose threads have ended.
  /// \param used the loop that used the thread's operands; kUnknown: none
  /// \param shared several threads have used them: a new one shares the loop even if others run it
  std::size_t of_thread(const Thread& thread, std::size_t used, bool shared);
  /// The loop that `current` refers to from now on: that of an operator that begins or ends.
  Loop& go_to(std::size_t loop) {
    return *loops_[current_ = loop];
  }
  Loop& current() const {
    return *loops_[current_];
  }
  Loop& operator[](std::size_t loop) const {
    return *loops_[loop];
  }
  /// Threads of loop `from` run loop `to` from now on.
  void join(std::size_t from, std::size_t to);
  /// Gives each loop that has run a share of the budget, by what it needs, now and then. Stops the others.
  /// \param now number of operators begun
  void share_budget(std::uint64_t now);

  /// Number of operators in one iteration of each loop that follows a schedule.
  std::uint64_t step_length() const;
  std::uint64_t sum(std::uint64_t Policy::Counters::* counter) const;

 private:
  struct Runner {
    std::weak_ptr<const void> thread; ///< keeps the address from being reused
    const void* address;
    std::size_t loop;
  };

  std::unique_ptr<Loop> make() const;
  bool is_free(std::size_t loop) const;

  PolicyOptions options_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::vector<Runner> runners_;
  Policy::Counters joined_; ///< of loops that others have joined
  std::size_t current_ = 0;
  std::uint64_t next_share_ = 0; ///< the operator at which to share the budget again
};

} // namespace torch_uvm
