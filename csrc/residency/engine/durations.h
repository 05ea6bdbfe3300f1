// Reports to a device's policy how long operators take, while the policy asks for it.
#pragma once

#include <memory>

#include "residency/policy/policy.h"
#include "residency/trace/operator_timer.h"
#include "runtime/managed_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the engine's mutex guards it.
class Durations {
 public:
  /// Both must outlive the object.
  Durations(ManagedRuntime& runtime, Policy& policy) : runtime_(runtime), policy_(policy) {}

  /// Called after each `Policy::begin`.
  /// \param decision what it returned
  /// \param stream the operator's
  void begin(const Decision& decision, Stream stream, OperatorKey key) noexcept;
  /// The timer of single operators; nullptr: none is asked for.
  OperatorTimer* timer() const {
    return timer_.get();
  }

 private:
  ManagedRuntime& runtime_;
  Policy& policy_;
  std::unique_ptr<OperatorTimer> timer_;
};

} // namespace torch_uvm
