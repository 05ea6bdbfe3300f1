#include "tensor/storage/managed_tensor.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>

#include "tensor/storage/labels.h"
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
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("torch_uvm::_is_managed", "").typed<bool(const at::Tensor&)>();
    return op.call(tensor); // the dispatcher unwraps the tensor
  }
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         is_managed(data_of(tensor.storage()));
}

} // namespace torch_uvm
