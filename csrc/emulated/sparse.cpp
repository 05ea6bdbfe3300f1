// Sparse COO tensors: two strided tensors, the indices and the values. A CPU kernel gets a CPU sparse tensor made of
// their aliases.
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <c10/core/DeviceGuard.h>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/operands.h"

namespace torch_uvm::emulated {
namespace {

at::SparseTensorImpl& sparse_impl(const at::Tensor& tensor) {
  return *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
}

void assign(at::SparseTensorImpl& to, const at::SparseTensorImpl& from, const at::Tensor& indices,
            const at::Tensor& values) {
  to.raw_resize_(from.sparse_dim(), from.dense_dim(), from.sizes());
  to.set_indices_and_values_unsafe(indices, values);
  to.set_coalesced(from.coalesced());
}

at::Tensor make_sparse_like(const at::Tensor& like, c10::DispatchKey key, const at::Tensor& indices,
                            const at::Tensor& values) {
  const c10::DeviceGuard guard(values.device()); // SparseTensorImpl takes the current device
  at::Tensor made = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), like.dtype());
  assign(sparse_impl(made), sparse_impl(like), indices, values);
  return made;
}

} // namespace

void add_accesses(const at::Tensor& tensor, bool write, c10::SmallVectorImpl<Touch>& accesses) {
  if (tensor.is_sparse()) {
    accesses.push_back(access_of(sparse_impl(tensor).indices(), write));
    accesses.push_back(access_of(sparse_impl(tensor).values(), write));
  } else {
    accesses.push_back(access_of(tensor, write));
  }
}

at::Tensor Operands::sparse_to_cpu(const at::Tensor& tensor, bool written) {
  const at::SparseTensorImpl& impl = sparse_impl(tensor);
  at::Tensor cpu = make_sparse_like(tensor, c10::DispatchKey::SparseCPU, to_cpu(impl.indices(), written),
                                    to_cpu(impl.values(), written));
  remember({cpu, tensor, written});
  return cpu;
}

at::Tensor Operands::sparse_to_device(const at::Tensor& result) {
  const at::SparseTensorImpl& impl = sparse_impl(result);
  return make_sparse_like(result, c10::DispatchKey::SparsePrivateUse1, to_device(impl.indices()),
                          to_device(impl.values()));
}

/// The operator may have replaced the indices and values of a sparse tensor that it writes.
void Operands::write_back_sparse(const Alias& alias) {
  const at::SparseTensorImpl& from = sparse_impl(alias.cpu);
  at::SparseTensorImpl& to = sparse_impl(alias.original);
  const at::Tensor indices = to_device(from.indices());
  const at::Tensor values = to_device(from.values());
  if (!indices.is_same(to.indices()) || !values.is_same(to.values()) || from.sizes() != to.sizes() ||
      from.coalesced() != to.coalesced()) {
    assign(to, from, indices, values);
  }
}

void register_sparse(torch::Library& aten) {
  aten.impl("copy_", TORCH_FN(at::native::copy_sparse_wrapper_));
  aten.impl("copy_sparse_to_sparse_", TORCH_FN(at::native::copy_sparse_));
}

} // namespace torch_uvm::emulated
