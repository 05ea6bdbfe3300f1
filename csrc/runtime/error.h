// The errors of the floors below torch. The bindings turn them into Python exceptions:
// InvalidArgument -> ValueError, OutOfMemory -> torch.OutOfMemoryError, RuntimeFailure -> RuntimeError.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace torch_uvm {

/// The caller's value is not acceptable; the message names it and what would be.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// A runtime call failed; the message carries the call and the runtime's own error text.
struct RuntimeFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Memory was refused. Nothing was allocated and nothing changed.
struct OutOfMemory : std::runtime_error {
  enum class Cause {
    kLimit, ///< our own limit of managed bytes, or of pinned ones
    kBudget, ///< a device's budget
    kHost, ///< the host has not that much available
    kDevice, ///< the device's memory (plain allocations only)
    kRuntime, ///< the runtime refused, for a reason of its own
  };

  OutOfMemory(Cause cause, std::size_t bytes, const std::string& message)
      : std::runtime_error(message), cause(cause), bytes(bytes) {}

  Cause cause;
  std::size_t bytes; ///< what was asked for
};

} // namespace torch_uvm
