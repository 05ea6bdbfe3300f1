#include "tensor/observed_operators.h"

#include <ATen/core/function_schema.h>

#include <algorithm>
#include <array>
#include <functional>
#include <string_view>
#include <unordered_map>

namespace torch_uvm {
namespace {

constexpr std::array<std::string_view, 3> kUsesEachByteOnce = {"aten::_fused_", "aten::_foreach_", "aten::embedding"};

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

} // namespace

ObservedOperator::ObservedOperator(const at::RecordFunction& function)
    : name_(function.name()),
      overload_(function.overload_name()),
      key_(std::hash<std::string>{}(name_ + "." + overload_)) {
  const std::optional<c10::FunctionSchema> schema = function.operator_schema();
  if (!schema) {
    return;
  }
  transparent_ = std::ranges::any_of(schema->returns(), [](const c10::Argument& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
  if (name_ == "torch_uvm::move") {
    transparent_ = false; // an alias as well, but the other label has the device's copy
  }
  collective_ = name_.starts_with("c10d");
  const bool normalises = contains(name_, "_norm") && !contains(name_, "backward");
  for (const c10::Argument& argument : schema->arguments()) {
    // Running statistics are written, and so is what a collective takes, and the schema does not say so.
    const bool unsaid = collective_ || (normalises && contains(argument.name(), "running_"));
    writes_.push_back(unsaid || (argument.alias_info() != nullptr && argument.alias_info()->isWrite()));
  }
  in_place_ok_ =
      std::ranges::any_of(kUsesEachByteOnce, [&](std::string_view prefix) { return name_.starts_with(prefix); });
}

bool ObservedOperator::is(const at::RecordFunction& function) const {
  return name_ == function.name() && overload_ == function.overload_name();
}

const ObservedOperator& observed_operator(const at::RecordFunction& function) {
  // By the address of its name, which is the schema's own. One that was deregistered may leave its address to
  // another. A thread's own map needs no lock.
  thread_local std::unordered_map<const char*, ObservedOperator> known;
  const auto found = known.find(function.name());
  if (found != known.end() && found->second.is(function)) {
    return found->second;
  }
  return known.insert_or_assign(function.name(), ObservedOperator(function)).first->second;
}

} // namespace torch_uvm
