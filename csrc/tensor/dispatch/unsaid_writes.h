// Arguments that an operator writes although its schema does not declare them mutable.
#pragma once

#include <string_view>

namespace torch_uvm {

/// Covers PyTorch's own operators:
/// - Normalisations update `running_mean` and `running_var`.
/// - cuDNN and MIOpen RNNs advance the random state of their dropout (`dropout_state`).
/// - The backward of RNNs uses the buffer saved by forward (`reserve`, oneDNN's `workspace`) as scratch memory.
/// \param op with namespace, without overload: "aten::native_batch_norm"
bool writes_unsaid(std::string_view op, std::string_view argument);

} // namespace torch_uvm
