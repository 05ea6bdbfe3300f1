// Errors of the layers that do not use torch. The bindings translate them to Python exceptions:
// InvalidArgument -> ValueError, OutOfMemory -> torch.OutOfMemoryError, RuntimeFailure -> RuntimeError.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace torch_uvm {

/// The caller passed an invalid value. The message names it and the accepted values.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// A runtime call failed. The message contains the call and the runtime's error text.
struct RuntimeFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Memory was refused. Nothing was allocated and nothing changed.
struct OutOfMemory : std::runtime_error {
  enum class Cause {
    kLimit, ///< the configured limit of managed or of pinned bytes
    kBudget, ///< a device's budget
    kHost, ///< the host does not have that much available
    kDevice, ///< the device's memory is full (plain allocations only)
    kRuntime, ///< the runtime refused for a reason of its own
  };

  OutOfMemory(Cause cause, std::size_t bytes, const std::string& message)
      : std::runtime_error(message), cause(cause), bytes(bytes) {}

  Cause cause;
  std::size_t bytes; ///< requested
};

} // namespace torch_uvm
