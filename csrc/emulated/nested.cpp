// Nested tensors of strided layout: one storage, and CPU tensors with the sizes, strides and offset of each part. A CPU
// kernel gets a CPU nested tensor on the same storage. Nested tensors of jagged layout need nothing here: they are
// composed of strided tensors in Python.
#include <ATen/NestedTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_like_native.h>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/memory.h"
#include "emulated/operands.h"
#include "tensor/storage/host_tensors.h"

namespace torch_uvm::emulated {
namespace {

using at::native::NestedTensorImpl;

const NestedTensorImpl& impl_of(const at::Tensor& tensor) {
  return *static_cast<const NestedTensorImpl*>(tensor.unsafeGetTensorImpl());
}

/// Sizes, strides and offsets stay on the host. If a kernel allocated them, they are in kernel memory and are copied.
at::Tensor on_host(const at::Tensor& metadata) {
  if (!is_kernel_memory(metadata.storage().data_ptr())) {
    return metadata;
  }
  const AllocationScope ordinary(kOrdinary);
  return metadata.clone();
}

at::Tensor make_like(const at::Tensor& like, c10::DispatchKey key, c10::Storage storage) {
  const auto elements = static_cast<std::int64_t>(storage.nbytes() / like.itemsize());
  const at::Tensor buffer =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  buffer.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
  const NestedTensorImpl& impl = impl_of(like);
  return at::detail::make_tensor<NestedTensorImpl>(buffer, on_host(impl.get_nested_sizes()),
                                                   on_host(impl.get_nested_strides()),
                                                   on_host(impl.get_storage_offsets()));
}

} // namespace

at::Tensor Operands::nested_to_cpu(const at::Tensor& tensor, bool written) {
  const Shadow& shadow = shadow_of(tensor.storage().unsafeGetStorageImpl(), written);
  at::Tensor cpu = make_like(tensor, c10::DispatchKey::CPU, c10::Storage(shadow.storage));
  remember({cpu, tensor, written});
  return cpu;
}

at::Tensor Operands::nested_to_device(const at::Tensor& result) {
  c10::StorageImpl* storage = result.storage().unsafeGetStorageImpl();
  if (const Shadow* shadow = shadow_behind(storage)) {
    return make_like(result, c10::DispatchKey::PrivateUse1,
                     c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(shadow->original)));
  }
  label(storage);
  at::Tensor made = make_like(result, c10::DispatchKey::PrivateUse1, result.storage());
  fresh_.push_back(access_of(made, /*write=*/true));
  return made;
}

// PyTorch's implementations work on any device, because they copy the underlying buffer.
void register_nested(torch::Library& aten) {
  aten.impl("_to_copy", TORCH_FN(at::native::_to_copy_nested));
  aten.impl("empty_like", TORCH_FN(at::native::empty_like_nested));
  aten.impl("copy_", TORCH_FN(at::native::copy_nested_));
}

} // namespace torch_uvm::emulated
