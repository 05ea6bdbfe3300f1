// Makes a runtime's calls fail, for tests: the Nth call of a name fails once.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/emulated/emulated_runtime.h"

namespace torch_uvm {

/// Not thread-safe: the runtime's mutex guards it.
class FailingCalls {
 public:
  /// The `nth` call named `name` from now on (1: the next one) fails: an allocation with OutOfMemory, any other call
  /// with RuntimeFailure. Destroy and free functions cannot fail. The name "*" counts every call that can fail.
  /// \throws InvalidArgument for a name that cannot fail, and for nth = 0
  void fail(std::string_view name, std::size_t nth);
  /// Cancels all pending failures.
  /// \return the number of calls that remained until the next one; 0: none was pending
  std::size_t clear() noexcept;

  /// Counts a call.
  /// \return whether this call fails
  bool counts(std::string_view name);
  /// Throws the error of the failing call `name` of `runtime`. For an allocation, the message has its bytes.
  [[noreturn]] static void raise(std::string_view runtime, std::string_view name, std::size_t bytes);

 private:
  struct Failure {
    std::string name;
    std::size_t remaining;
  };
  std::vector<Failure> failures_;
};

/// Makes calls of an emulated runtime fail. Owns the runtime's call hook during its lifetime. Thread-safe.
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
