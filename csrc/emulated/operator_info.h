// Properties of an operator that the fallback needs, read once from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_uvm::emulated {

enum class ArgumentKind : std::uint8_t { kOther, kTensor, kGenerator, kDevice }; ///< kTensor: lists too

struct OperatorInfo {
  explicit OperatorInfo(c10::OperatorName name) : name(std::move(name)) {}

  struct Argument {
    ArgumentKind kind = ArgumentKind::kOther;
    bool written = false; ///< the operator writes to this argument
    bool may_be_cpu = false; ///< may be a CPU tensor of any size, as with CUDA
    bool may_be_number = false; ///< may be a 0-dim CPU tensor
  };

  /// Argument positions of an operator that uses only the rows of a tensor that an index selects.
  struct Rows {
    std::size_t tensor, index;
    std::optional<std::size_t> dim; ///< position of the indexed dimension's number; nullopt: dimension 0
  };

  c10::OperatorName name;
  std::vector<Argument> arguments;
  std::size_t returns = 0;
  bool is_view = false; ///< returns an alias of an argument; accesses no bytes
  bool draws_by_default = false; ///< draws random numbers but takes no generator
  std::uint32_t cpu_returns = 0; ///< bit i: return i is a CPU tensor, whatever the device
  std::optional<Rows> rows;
};

/// Thread-safe. The reference stays valid forever.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

} // namespace torch_uvm::emulated
