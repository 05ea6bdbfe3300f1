#include "runtime/testing/emulated_failures.h"

namespace torch_uvm {

EmulatedFailures::EmulatedFailures(EmulatedRuntime& runtime) : runtime_(runtime) {
  runtime_.set_call_hook([this](std::string_view name, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (calls_.counts(name)) {
      FailingCalls::raise("emulated", name, bytes);
    }
  });
}

EmulatedFailures::~EmulatedFailures() {
  runtime_.set_call_hook(nullptr);
}

void EmulatedFailures::fail(std::string_view name, std::size_t nth) {
  const std::lock_guard lock(mutex_);
  calls_.fail(name, nth);
}

std::size_t EmulatedFailures::clear() {
  const std::lock_guard lock(mutex_);
  return calls_.clear();
}

} // namespace torch_uvm
