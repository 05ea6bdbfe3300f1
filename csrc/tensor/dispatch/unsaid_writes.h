// Arguments that an operator's kernel writes to although its schema says that they are only read.
#pragma once

#include <string_view>

namespace torch_uvm {

/// Of PyTorch's own operators.
/// - Normalisations update `running_mean` and `running_var`.
/// - cuDNN's and MIOpen's recurrent layers advance the random state of their dropout (`dropout_state`).
/// - Backward of recurrent layers uses what forward has put aside (`reserve`, oneDNN's `workspace`) as scratch memory.
/// \param op with its namespace, without its overload: "aten::native_batch_norm"
bool writes_unsaid(std::string_view op, std::string_view argument);

} // namespace torch_uvm
