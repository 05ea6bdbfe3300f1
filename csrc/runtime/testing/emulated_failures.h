// Makes calls of an emulated runtime fail, for tests.
#pragma once

#include <cstddef>
#include <mutex>
#include <string_view>

#include "runtime/emulated/emulated_runtime.h"
#include "runtime/testing/failing_calls.h"

namespace torch_uvm {

/// Owns the runtime's call hook during its lifetime. Thread-safe.
class EmulatedFailures {
 public:
  explicit EmulatedFailures(EmulatedRuntime& runtime);
  ~EmulatedFailures();
  EmulatedFailures(const EmulatedFailures&) = delete;
  EmulatedFailures& operator=(const EmulatedFailures&) = delete;

  /// Like FailingCalls::fail and FailingCalls::clear.
  void fail(std::string_view name, std::size_t nth);
  std::size_t clear();

 private:
  EmulatedRuntime& runtime_;
  std::mutex mutex_; ///< locked while the runtime's mutex is held
  FailingCalls calls_;
};

} // namespace torch_uvm
