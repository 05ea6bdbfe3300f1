// An operator's tensors, seen from both sides: as the accelerator's, and as CPU tensors on the same
// bytes for the time of one CPU kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <unordered_map>
#include <vector>

#include "runtime/emulated/emulated_runtime.h"
#include "tensor/dispatch/kernels.h"

namespace torch_uvm::emulated {

/// The bytes of a strided tensor's storage that its sizes and strides can reach; of a nested tensor's, all.
Touch access_of(const at::Tensor& tensor, bool write);

/// Adds what the operator uses of `tensor`, sparse ones included.
void add_accesses(const at::Tensor& tensor, bool write, c10::SmallVectorImpl<Touch>& accesses);

/// Lives for one call. Tensors that share a storage share the CPU's view of it, too, so that kernels
/// see the same overlaps on both sides.
class Operands {
 public:
  /// \param touches whether bytes are read or written; else the operator makes views
  explicit Operands(int device, bool touches = true) : device_(device) {
    if (touches) {
      kernel_.emplace();
    }
  }

  /// Whether the operator reads or writes bytes.
  bool touches() const {
    return kernel_.has_value();
  }

  /// A CPU tensor on the bytes of `tensor`, which is the accelerator's.
  /// \param written whether the kernel may change it: its bytes, or its sizes and storage (out=, resize)
  at::Tensor to_cpu(const at::Tensor& tensor, bool written);

  /// What a kernel's result is on the accelerator: the tensor that it is an alias of, a view of the
  /// storage that it shares, or, for fresh memory, that memory under the accelerator's label.
  at::Tensor to_device(const at::Tensor& result);

  /// Carries over what the kernel changed of sizes, strides and storages of written arguments.
  void write_back();

  /// The fresh results of to_device, for the touches of the kernel's end.
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

  at::Tensor sparse_to_cpu(const at::Tensor& tensor, bool written); ///< sparse.cpp, as all of sparse tensors
  at::Tensor sparse_to_device(const at::Tensor& result);
  void write_back_sparse(const Alias& alias);
  at::Tensor nested_to_cpu(const at::Tensor& tensor, bool written); ///< nested.cpp, as all of nested tensors
  at::Tensor nested_to_device(const at::Tensor& result);

  void remember(Alias alias);
  Shadow& shadow_of(c10::StorageImpl* original, bool written);
  const Alias* alias_of(const c10::TensorImpl* cpu) const;
  const Shadow* shadow_behind(const c10::StorageImpl* storage) const;
  void label(c10::StorageImpl* storage);

  std::optional<Kernel> kernel_; ///< reads the addresses
  int device_;
  c10::SmallVector<Shadow, 4> shadows_;
  c10::SmallVector<Alias, 4> aliases_;
  c10::SmallVector<Touch, 4> fresh_;
  // Filled only for long argument lists (foreach and fused optimizers), where a walk would be quadratic.
  std::unordered_map<const void*, std::size_t> shadow_index_, shadow_storage_index_, alias_index_;
};

/// A tensor of the accelerator on `storage`, with the sizes, strides, offset and bits of `like`.
at::Tensor make_device_tensor(c10::Storage storage, const at::Tensor& like);

} // namespace torch_uvm::emulated
