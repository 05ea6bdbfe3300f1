#include "tensor/dispatch/unsaid_writes.h"

namespace torch_uvm {

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
