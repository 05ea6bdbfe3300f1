// Reports to a device's policy how long operators and iterations take, while the policy asks for it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "allocator/events.h"
#include "residency/policy/policy.h"
#include "residency/trace/operator_timer.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the engine's mutex guards it.
class Durations {
 public:
  /// Both must outlive the object.
  Durations(ManagedRuntime& runtime, Policy& policy);
  ~Durations();
  Durations(const Durations&) = delete;
  Durations& operator=(const Durations&) = delete;

  /// Called after each `Policy::begin`.
  /// \param decision what it returned
  /// \param stream the operator's
  void begin(const Decision& decision, Stream stream, OperatorKey key) noexcept;
  /// The timer of single operators; nullptr: none is asked for.
  OperatorTimer* timer() const {
    return timer_.get();
  }

 private:
  struct Mark {
    std::uint64_t number = 0;
    bool is_whole = false;
    Stream stream;
    Event event;
  };
  void add_mark(const Decision& decision, Stream stream);
  void report_iterations();

  ManagedRuntime& runtime_;
  Policy& policy_;
  EventPool events_;
  std::unique_ptr<OperatorTimer> timer_;
  std::deque<Mark> marks_; ///< an iteration lasts from one to the next
};

} // namespace torch_uvm
