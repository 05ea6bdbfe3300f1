#include "doubles/failing_calls.h"

#include <algorithm>
#include <array>

#include "runtime/error.h"

namespace torch_uvm {
namespace {

// Destroy and free functions cannot fail, so they are not listed.
constexpr std::array<std::string_view, 18> kMayFail{
    "allocate_managed",  "allocate_pinned",    "allocate_device", "prefetch",           "advise",
    "discard",           "copy_async",         "create_stream",   "query_stream",       "create_event",
    "record_event",      "synchronize_stream", "query_event",     "synchronize_device", "wait_event",
    "synchronize_event", "zero_async",         "delay",
};

bool may_fail(std::string_view name) {
  return std::ranges::find(kMayFail, name) != kMayFail.end();
}

} // namespace

void FailingCalls::fail(std::string_view name, std::size_t nth) {
  if (name != "*" && !may_fail(name)) {
    std::string accepted = "*";
    for (const std::string_view known : kMayFail) {
      accepted += ", " + std::string(known);
    }
    throw InvalidArgument("calls named '" + std::string(name) + "' cannot be made to fail; these can: " + accepted);
  }
  if (nth == 0) {
    throw InvalidArgument("the 0th call cannot fail; the next one is the 1st");
  }
  failures_.push_back({std::string(name), nth});
}

std::size_t FailingCalls::clear() noexcept {
  const auto next = std::ranges::min_element(failures_, {}, &Failure::remaining);
  const std::size_t left = next == failures_.end() ? 0 : next->remaining;
  failures_.clear();
  return left;
}

bool FailingCalls::counts(std::string_view name) {
  if (failures_.empty() || !may_fail(name)) {
    return false;
  }
  bool fails = false;
  std::erase_if(failures_, [&](Failure& failure) {
    const bool its_turn = (failure.name == "*" || failure.name == name) && --failure.remaining == 0;
    fails = fails || its_turn;
    return its_turn;
  });
  return fails;
}

void FailingCalls::raise(std::string_view runtime, std::string_view name, std::size_t bytes) {
  const std::string message = std::string(runtime) + " runtime: " + std::string(name) + " was made to fail";
  if (name.starts_with("allocate_")) {
    throw OutOfMemory(OutOfMemory::Cause::kRuntime, bytes, message);
  }
  throw RuntimeFailure(message);
}

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
