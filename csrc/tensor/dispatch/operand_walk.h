// Finds the tensors in an operator's boxed inputs and outputs, and the current streams of their devices.
#pragma once

#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>

#include <vector>

#include "runtime/location.h"
#include "tensor/process/streams.h"

namespace torch_uvm {

/// Calls `visit` with the tensor, or with the component tensors of a sparse tensor, which has no storage itself.
template <typename Visit>
void visit_parts(const at::Tensor& tensor, const Visit& visit) {
  // The casts may fail: a functorch wrapper copies the Sparse key of the tensor that it wraps. The operators on the
  // inner tensor are observed on their own.
  if (tensor.unsafeGetTensorImpl()->is_sparse()) {
    if (const auto* sparse = dynamic_cast<const at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl())) {
      visit(sparse->indices());
      visit(sparse->values());
      return;
    }
  } else if (tensor.unsafeGetTensorImpl()->is_sparse_compressed()) {
    if (const auto* sparse = dynamic_cast<const at::SparseCsrTensorImpl*>(tensor.unsafeGetTensorImpl())) {
      visit(sparse->compressed_indices());
      visit(sparse->plain_indices());
      visit(sparse->values());
      return;
    }
  }
  visit(tensor);
}

/// Calls `visit` with each tensor of the value: itself, and those in lists (collectives gather into lists of lists) and
/// tuples. Some may be undefined: in a list of optional tensors, None is an undefined tensor or None.
template <typename Visit>
void for_each_whole_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isNone() && !element.isList()) {
        return; // a list of numbers
      }
      for_each_whole_tensor(element, visit);
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      for_each_whole_tensor(element, visit);
    }
  }
}

/// The same, with the parts of sparse tensors in place of these.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  for_each_whole_tensor(value, [&](const at::Tensor& tensor) { visit_parts(tensor, visit); });
}

inline bool is_accelerators(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return false;
  }
  const c10::Device device = tensor.device();
  return !device.is_cpu() && !device.is_meta();
}

/// The storage of an accelerator tensor; nullptr for other tensors and for those without storage.
inline c10::StorageImpl* accelerators_storage(const at::Tensor& tensor) {
  return is_accelerators(tensor) && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// The calling thread's current streams by device, for the devices that `ask` was called with since `clear`.
class CurrentStreams {
 public:
  void clear() {
    streams_.assign(streams_.size(), Stream::host());
  }
  void ask(c10::Device device) {
    const auto index = static_cast<std::size_t>(device.index());
    if (index >= streams_.size()) {
      streams_.resize(index + 1, Stream::host());
    }
    if (streams_[index].is_host()) {
      streams_[index] = current_stream_of(device);
    }
  }
  const std::vector<Stream>& get() const {
    return streams_;
  }

 private:
  std::vector<Stream> streams_;
};

} // namespace torch_uvm
