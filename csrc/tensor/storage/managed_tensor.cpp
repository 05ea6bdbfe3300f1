#include "tensor/storage/managed_tensor.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include "tensor/moves/operators.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {

bool is_managed(const at::Tensor& tensor) {
  if (!tensor.defined() || at::functionalization::impl::isFunctionalTensor(tensor)) {
    return false;
  }
  if (const auto* batched = at::functorch::maybeGetBatchedImpl(tensor)) {
    return is_managed(batched->value());
  }
  if (tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) {
    return is_managed_operator().call(tensor); // the dispatcher knows how to take the wrapper off
  }
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         is_managed(tensor.storage().data_ptr());
}

} // namespace torch_uvm
