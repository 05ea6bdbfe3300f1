// What the watcher needs to know of an operator, read once from its schema.
#pragma once

#include <ATen/record_function.h>

#include <string>
#include <vector>

#include "residency/policy.h"

namespace torch_uvm {

class ObservedOperator {
 public:
  explicit ObservedOperator(const at::RecordFunction& function);

  /// Is no operator, or makes only an alias of what it takes: what it calls is looked at instead.
  bool is_transparent() const {
    return transparent_;
  }
  /// Whether it writes to the tensors of an input.
  bool writes(std::size_t input) const {
    return input < writes_.size() && writes_[input];
  }
  /// It uses each byte about once, so that bytes on the host may stay there: optimizers, lookups in tables.
  bool in_place_ok() const {
    return in_place_ok_;
  }
  /// Its work may go on, on streams that nobody sees, after it has returned.
  bool is_collective() const {
    return collective_;
  }
  OperatorKey key() const {
    return key_;
  }
  const std::string& name() const {
    return name_;
  }

  bool is(const at::RecordFunction& function) const;

 private:
  std::string name_;
  std::string overload_;
  OperatorKey key_ = 0;
  bool transparent_ = true;
  bool in_place_ok_ = false;
  bool collective_ = false;
  std::vector<bool> writes_;
};

/// Valid until the thread's next call. \throws std::bad_alloc
const ObservedOperator& observed_operator(const at::RecordFunction& function);

} // namespace torch_uvm
