// Calls of a runtime that are made to fail, for tests: the Nth of a name, once.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace torch_uvm {

/// Not thread-safe: the runtime's mutex guards it.
class FailingCalls {
 public:
  /// The `nth` call named `name` from now on (1: the next) fails: allocations with OutOfMemory, the others with
  /// RuntimeFailure. Destroy and free functions cannot fail. Name "*" counts every call that can.
  /// \throws InvalidArgument for a name that cannot fail, and for the 0th call
  void fail(std::string_view name, std::size_t nth);
  /// No call is made to fail any more. \return calls until the next one would have failed; 0: none would have
  std::size_t clear() noexcept;

  /// Counts a call. \return whether it is its turn to fail
  bool counts(std::string_view name);
  /// The error that the failing call `name` of `runtime` ends with; of an allocation, of that many bytes.
  [[noreturn]] static void raise(std::string_view runtime, std::string_view name, std::size_t bytes);

 private:
  struct Failure {
    std::string name;
    std::size_t remaining;
  };
  std::vector<Failure> failures_;
};

} // namespace torch_uvm
