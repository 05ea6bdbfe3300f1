// Calls of an emulated runtime that are made to fail, for tests.
#pragma once

#include <cstddef>
#include <mutex>
#include <string_view>

#include "runtime/emulated/emulated_runtime.h"
#include "runtime/testing/failing_calls.h"

namespace torch_uvm {

/// Has the runtime's call hook from its construction to its destruction. Thread-safe.
class EmulatedFailures {
 public:
  explicit EmulatedFailures(EmulatedRuntime& runtime);
  ~EmulatedFailures();
  EmulatedFailures(const EmulatedFailures&) = delete;
  EmulatedFailures& operator=(const EmulatedFailures&) = delete;

  /// As FailingCalls::fail and FailingCalls::clear.
  void fail(std::string_view name, std::size_t nth);
  std::size_t clear();

 private:
  EmulatedRuntime& runtime_;
  std::mutex mutex_; // taken with the runtime's held
  FailingCalls calls_;
};

} // namespace torch_uvm
