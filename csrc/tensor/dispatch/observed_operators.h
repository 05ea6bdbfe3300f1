// Operator properties that the watcher needs, read once from the schema and cached per thread.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "residency/policy/decision.h"

namespace torch_uvm {

/// Where NCCL queues a collective's kernels.
enum class SentBy : std::uint8_t {
  kCurrentStream, ///< at once, if it returns no Work
  kOwnStream, ///< at once
  kPerhapsAGroup, ///< at the latest when its group ends
};

struct ObservedOperator {
  ObservedOperator() = default; ///< not an operator but a range that PyTorch names, as around a node of the backward
  explicit ObservedOperator(const c10::FunctionSchema& schema);

  /// Whether it writes to the tensors of the input at an index.
  bool writes(std::size_t input) const {
    return input < writes_.size() && writes_[input];
  }
  /// Of a collective with these inputs.
  SentBy sent_by(c10::ArrayRef<const c10::IValue> inputs) const {
    if (async_op_ >= inputs.size()) {
      return SentBy::kPerhapsAGroup;
    }
    return inputs[async_op_].isBool() && !inputs[async_op_].toBool() ? SentBy::kCurrentStream : SentBy::kOwnStream;
  }
  bool is(const char* other, const char* overload) const;

  std::string name;
  OperatorKey key = 0;
  /// Not an operator, or returns a view of an input. The watcher ignores it and sees the operators that it calls.
  bool transparent = true;
  /// It touches each byte about once, so it may use host copies in place: fused and foreach operators, embeddings.
  bool in_place_ok = false;
  /// A c10d collective: its work may continue on internal streams after the operator has returned.
  bool collective = false;

 private:
  std::string overload_;
  std::size_t async_op_ = SIZE_MAX; ///< the index of that argument
  std::vector<bool> writes_;
};

/// Operators that a thread has called. One cache per thread, so lookups need no lock.
class ObservedOperators {
 public:
  /// Looks up by the address of the name, which the schema owns. The names are compared as well: after a
  /// deregistration, another operator may reuse the address.
  /// \return an element of the cache; it does not move, and changes only if its operator is deregistered and another
  ///         one reuses the address \throws std::bad_alloc
  const ObservedOperator& of(const at::RecordFunction& function);
  /// How many it has.
  std::size_t size() const {
    return known_.size();
  }

 private:
  std::unordered_map<const char*, ObservedOperator> known_;
  const ObservedOperator range_;
};

/// Whether an operator writes an argument that its schema does not declare mutable. Covers PyTorch's own operators:
/// - Normalisations update `running_mean` and `running_var`.
/// - cuDNN and MIOpen RNNs advance the random state of their dropout (`dropout_state`).
/// - The backward of RNNs uses the buffer saved by forward (`reserve`, oneDNN's `workspace`) as scratch memory.
/// \param op with namespace, without overload: "aten::native_batch_norm"
bool writes_unsaid(std::string_view op, std::string_view argument);

} // namespace torch_uvm
