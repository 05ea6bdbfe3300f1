// CPU aliases of an operator's tensors, for the duration of one CPU kernel. An alias has the same bytes as the
// accelerator's tensor.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "emulated/backend.h"
#include "runtime/emulated/emulated_runtime.h"
#include "tensor/dispatch/kernels.h"

namespace torch_uvm::emulated {

/// Whether the tensor is defined and on the accelerator.
inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDeviceType;
}

/// A copy of an operator's argument or result with each tensor replaced, in nested lists too.
template <class Replace>
c10::IValue replaced(const c10::IValue& value, const Replace& replace) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (!value.isList()) {
    return value;
  }
  c10::impl::GenericList made(value.toList().elementType());
  for (const c10::IValue& element : value.toListRef()) {
    made.push_back(replaced(element, replace));
  }
  return made;
}

/// The bytes of a strided tensor's storage that its sizes and strides reach; a nested tensor's whole storage.
Touch access_of(const at::Tensor& tensor, bool write);

/// Appends the accesses to `tensor`, which may be sparse.
void add_accesses(const at::Tensor& tensor, bool write, c10::SmallVectorImpl<Touch>& accesses);

/// The aliases of one operator call. Tensors that share a storage have aliases that share one, so that kernels see the
/// same overlaps.
class Operands {
 public:
  /// \param touches whether the operator reads or writes bytes; false for view operators
  explicit Operands(int device, bool touches = true) : device_(device) {
    if (touches) {
      kernel_.emplace();
    }
  }

  /// Whether the operator reads or writes bytes.
  bool touches() const {
    return kernel_.has_value();
  }

  /// The CPU alias of an accelerator tensor.
  /// \param written whether the kernel may change its bytes, sizes or storage (out=, resize)
  at::Tensor to_cpu(const at::Tensor& tensor, bool written);

  /// The accelerator tensor for a kernel's result: the original if `result` is an alias, a view if it shares an alias's
  /// storage, else the result's own memory, relabelled as the accelerator's.
  at::Tensor to_device(const at::Tensor& result);

  /// Applies the kernel's changes of sizes, strides and storages of written arguments to the originals.
  void write_back();

  /// Accesses to the new memory among the results, for end_kernel.
  const c10::SmallVector<Touch, 4>& fresh() const {
    return fresh_;
  }

 private:
  struct Shadow {
    c10::StorageImpl* original;
    c10::intrusive_ptr<c10::StorageImpl> storage;
    const void* data;
  };
  struct Alias {
    at::Tensor cpu;
    at::Tensor original;
    bool written;
  };

  at::Tensor sparse_to_cpu(const at::Tensor& tensor, bool written); ///< in sparse.cpp, like all for sparse tensors
  at::Tensor sparse_to_device(const at::Tensor& result);
  void write_back_sparse(const Alias& alias);
  at::Tensor nested_to_cpu(const at::Tensor& tensor, bool written); ///< in nested.cpp, like all for nested tensors
  at::Tensor nested_to_device(const at::Tensor& result);

  void remember(Alias alias);
  const Shadow& shadow_of(c10::StorageImpl* original, bool written);
  const Shadow* shadow_behind(const c10::StorageImpl* storage) const;
  void label(c10::StorageImpl* storage);

  std::optional<Kernel> kernel_; ///< keeps the operands' addresses stable; none for view operators
  int device_;
  std::vector<Shadow> shadows_;
  std::vector<Alias> aliases_;
  c10::SmallVector<Touch, 4> fresh_;
  // Argument lists may be long (foreach and fused optimizers).
  std::unordered_map<const void*, std::size_t> shadow_index_, shadow_storage_index_, alias_index_;
};

} // namespace torch_uvm::emulated
