#include "tensor/dispatch/observed_operators.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <optional>

namespace torch_uvm {
namespace {

constexpr std::array<std::string_view, 3> kUsesEachByteOnce = {"aten::_fused_", "aten::_foreach_", "aten::embedding"};
/// Collectives that PyTorch never sends one by one within a group, where a kernel is launched when the group ends.
constexpr std::array<std::string_view, 6> kNotInGroups = {"c10d::allreduce_",
                                                          "c10d::allreduce_coalesced_",
                                                          "c10d::_allgather_base_",
                                                          "c10d::_reduce_scatter_base_",
                                                          "c10d::allgather_into_tensor_coalesced_",
                                                          "c10d::reduce_scatter_tensor_coalesced_"};

} // namespace

ObservedOperator::ObservedOperator(const c10::FunctionSchema& schema)
    : name(schema.name()),
      key(std::hash<std::string>{}(name + "." + schema.overload_name())),
      overload_(schema.overload_name()) {
  transparent = std::ranges::any_of(schema.returns(), [](const c10::Argument& returned) {
    return returned.alias_info() != nullptr && !returned.alias_info()->isWrite();
  });
  if (name == "torch_uvm::move") {
    transparent = false; // also a view, but the new label shares the device copy, so the bytes must be there
  }
  collective = name.starts_with("c10d");
  const bool alone = std::ranges::find(kNotInGroups, name) != kNotInGroups.end();
  for (const c10::Argument& argument : schema.arguments()) {
    if (alone && (argument.name() == "async_op" || argument.name() == "asyncOp")) {
      async_op_ = writes_.size();
    }
    // Collectives write to their arguments without declaring it.
    const bool unsaid = collective || writes_unsaid(name, argument.name());
    writes_.push_back(unsaid || (argument.alias_info() != nullptr && argument.alias_info()->isWrite()));
  }
  in_place_ok =
      std::ranges::any_of(kUsesEachByteOnce, [&](std::string_view prefix) { return name.starts_with(prefix); });
}

bool ObservedOperator::is(const char* other, const char* overload) const {
  return std::strcmp(name.c_str(), other) == 0 && std::strcmp(overload_.c_str(), overload) == 0;
}

const ObservedOperator& ObservedOperators::of(const at::RecordFunction& function) {
  const char* const name = function.name();
  const char* const overload = function.overload_name();
  auto found = known_.find(name);
  if (found == known_.end() || !found->second.is(name, overload)) {
    const std::optional<c10::FunctionSchema> schema = function.operator_schema();
    if (!schema) {
      return range_; // not kept: its name is made for each call, so that its address says nothing
    }
    found = known_.insert_or_assign(name, ObservedOperator(*schema)).first;
  }
  return found->second;
}

bool writes_unsaid(std::string_view op, std::string_view argument) {
  const auto named = [op](std::string_view part) { return op.find(part) != std::string_view::npos; };
  if (!op.starts_with("aten::")) {
    return false;
  }
  const bool backward = named("backward");
  if (argument.starts_with("running_")) {
    return named("_norm") && !backward;
  }
  if (named("cudnn_rnn") || named("miopen_rnn")) {
    return argument == "dropout_state" || (backward && argument == "reserve");
  }
  return op == "aten::mkldnn_rnn_layer_backward" && argument == "workspace";
}

} // namespace torch_uvm
