// What the fallback needs to know about an operator, read once from its schema.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace torch_uvm::emulated {

struct OperatorInfo {
  explicit OperatorInfo(c10::OperatorName name) : name(std::move(name)) {}

  enum class Kind : std::uint8_t { kOther, kTensor, kTensorList, kGenerator, kDevice };

  struct Argument {
    Kind kind = Kind::kOther;
    bool written = false; ///< the operator writes to it
    bool may_be_cpu = false; ///< a CPU tensor of any size is accepted, as CUDA does
    bool may_be_number = false; ///< a 0-dim CPU tensor is accepted
  };

  /// Which arguments of an operator say that it uses some rows of a tensor, and which rows.
  struct Rows {
    std::size_t tensor, index;
    std::optional<std::size_t> dim; ///< the argument that says which dimension the index is of; without it, the first
  };

  c10::OperatorName name;
  std::vector<Argument> arguments;
  std::size_t returns = 0;
  bool is_view = false; ///< only makes an alias of its argument: touches no bytes
  bool draws_by_default = false; ///< draws random numbers without taking a generator
  std::uint32_t cpu_returns = 0; ///< bit i: return i is a CPU tensor on every device
  std::optional<Rows> rows;
};

/// Thread-safe; the reference is good for ever.
const OperatorInfo& operator_info(const c10::OperatorHandle& op);

} // namespace torch_uvm::emulated
