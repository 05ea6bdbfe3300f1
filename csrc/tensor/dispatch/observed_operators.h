// What the watcher needs to know of an operator, read once from its schema.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/record_function.h>

#include <array>
#include <cstddef>
#include <string>
#include <unordered_map>
#include <vector>

#include "residency/policy/policy.h"

namespace torch_uvm {

class ObservedOperator {
 public:
  explicit ObservedOperator(const at::RecordFunction& function);
  explicit ObservedOperator(const c10::FunctionSchema& schema);

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

  bool is(const char* name, const char* overload) const;

 private:
  ObservedOperator(std::string name, std::string overload);
  void read(const c10::FunctionSchema& schema);

  std::string name_;
  std::string overload_;
  OperatorKey key_ = 0;
  bool transparent_ = true;
  bool in_place_ok_ = false;
  bool collective_ = false;
  std::vector<bool> writes_;
};

/// Those that a thread has met: its own need no lock.
class ObservedOperators {
 public:
  /// By the address of its name, which is the schema's own. One that was deregistered may leave its address to another.
  /// \return valid until the next call. \throws std::bad_alloc
  const ObservedOperator& of(const at::RecordFunction& function);

 private:
  static constexpr std::size_t kSlots = 256; // a power of two; a step has some dozens of operators

  /// Where the address of a name says: what a step repeats is found at once.
  struct Slot {
    const char* name = nullptr;
    const ObservedOperator* op = nullptr; ///< of `known_`, which keeps it where it is
  };
  std::array<Slot, kSlots> slots_;
  std::unordered_map<const char*, ObservedOperator> known_;
};

} // namespace torch_uvm
