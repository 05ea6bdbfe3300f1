#include "emulated/operands.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>

#include "emulated/backend.h"
#include "emulated/memory.h"
#include "tensor/storage/host_tensors.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm::emulated {
namespace {

void release_original(void* original) {
  c10::raw::intrusive_ptr::decref(static_cast<c10::StorageImpl*>(original));
}

/// A CPU DataPtr to the bytes of `original`, which it keeps alive.
c10::DataPtr share(c10::StorageImpl* original, void* data) {
  c10::raw::intrusive_ptr::incref(original);
  return {data, original, &release_original, c10::Device(c10::DeviceType::CPU)};
}

void copy_metadata(const at::Tensor& from, c10::TensorImpl* to) {
  to->set_storage_offset(from.storage_offset());
  to->set_sizes_and_strides(from.sizes(), from.strides());
  if (from.is_conj()) {
    to->_set_conj(true);
  }
  if (from.is_neg()) {
    to->_set_neg(true);
  }
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to->set_wrapped_number(true);
  }
}

/// A tensor on `storage` with the sizes, strides, offset, and conjugate and negative bits of `like`.
at::Tensor make_tensor(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  at::Tensor made =
      at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  copy_metadata(like, made.unsafeGetTensorImpl());
  return made;
}

template <class Entry>
const Entry* find(const std::vector<Entry>& entries, const std::unordered_map<const void*, std::size_t>& index,
                  const void* key) {
  const auto found = index.find(key);
  return found == index.end() ? nullptr : &entries[found->second];
}

} // namespace

Touch access_of(const at::Tensor& tensor, bool write) {
  if (tensor.is_nested()) {
    return {tensor.storage().data(), tensor.storage().nbytes(), write};
  }
  if (tensor.numel() == 0) {
    return {};
  }
  const std::size_t item = tensor.itemsize();
  const auto* base = static_cast<const char*>(tensor.storage().data());
  return {base + static_cast<std::size_t>(tensor.storage_offset()) * item,
          at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), item), write};
}

const Operands::Shadow& Operands::shadow_of(c10::StorageImpl* original, bool written) {
  if (const Shadow* known = find(shadows_, shadow_index_, original)) {
    return *known;
  }
  void* data = nullptr; // a view operator must not read it: another thread may be changing it
  if (kernel_) {
    kernel_->use(original, written);
    // mutable_data() materialises a copy-on-write storage, so it is called only for written arguments.
    data = written ? original->mutable_data() : const_cast<void*>(original->data());
  }
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), original->nbytes(),
                                            share(original, data), c10::GetCPUAllocator(), original->resizable());
  shadow_index_.emplace(original, shadows_.size());
  shadow_storage_index_.emplace(storage.get(), shadows_.size());
  return shadows_.emplace_back(Shadow{original, std::move(storage), data});
}

at::Tensor Operands::to_cpu(const at::Tensor& tensor, bool written) {
  if (tensor.is_sparse()) {
    return sparse_to_cpu(tensor, written);
  }
  if (tensor.is_nested()) {
    return nested_to_cpu(tensor, written);
  }
  const Shadow& shadow = shadow_of(tensor.storage().unsafeGetStorageImpl(), written);
  at::Tensor cpu = make_tensor(c10::Storage(shadow.storage), c10::DispatchKey::CPU, tensor);
  remember({cpu, tensor, written});
  return cpu;
}

void Operands::remember(Alias alias) {
  alias_index_.emplace(alias.cpu.unsafeGetTensorImpl(), aliases_.size());
  aliases_.push_back(std::move(alias));
}

const Operands::Shadow* Operands::shadow_behind(const c10::StorageImpl* storage) const {
  return find(shadows_, shadow_storage_index_, storage);
}

// Relabels memory that a kernel allocated as the accelerator's, in place. The storage itself is relabelled, so results
// that share it keep sharing it.
void Operands::label(c10::StorageImpl* storage) {
  const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(device_));
  if (storage->device() == device) {
    return;
  }
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (is_kernel_memory(data)) {
    storage->set_data_ptr_noswap(data.get() != nullptr ? adopt_kernel_memory(data, device_) : allocate(device_, 0));
  } else if (data.get() != nullptr && block_of(data) == nullptr) {
    // Not allocated in the scope: by another thread of the kernel, or outside the kernel. It has to be copied.
    c10::DataPtr own = allocate(device_, storage->nbytes());
    std::memcpy(own.get(), data.get(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(own));
  } else {
    data.unsafe_set_device(device);
  }
  storage->set_allocator(device_allocator());
}

at::Tensor Operands::to_device(const at::Tensor& result) {
  if (!result.defined() || result.device().type() == kDeviceType) {
    return result;
  }
  if (const Alias* alias = find(aliases_, alias_index_, result.unsafeGetTensorImpl())) {
    return alias->original;
  }
  if (result.is_sparse()) {
    return sparse_to_device(result);
  }
  if (result.is_nested()) {
    return nested_to_device(result);
  }
  TORCH_CHECK_NOT_IMPLEMENTED(result.layout() == c10::Layout::Strided && result.has_storage(), "a result of layout ",
                              result.layout(),
                              " on the emulated accelerator, which has strided and sparse COO tensors only");
  // A plain tensor cannot hold its scales.
  TORCH_CHECK_NOT_IMPLEMENTED(!result.is_quantized(), "a result of dtype ", result.dtype(),
                              " on the emulated accelerator, which has no quantised tensors");
  c10::StorageImpl* storage = result.storage().unsafeGetStorageImpl();
  if (const Shadow* shadow = shadow_behind(storage)) {
    // As in PyTorch, a view of a normal tensor is a normal tensor even in inference mode, and a view of an inference
    // tensor is always an inference tensor.
    const c10::InferenceMode as_operand(std::ranges::any_of(aliases_, [&](const Alias& alias) {
      return alias.original.is_inference() && alias.original.has_storage() &&
             alias.original.storage().unsafeGetStorageImpl() == shadow->original;
    }));
    return make_tensor(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(shadow->original)),
                       c10::DispatchKey::PrivateUse1, result);
  }
  label(storage);
  at::Tensor made = make_tensor(result.storage(), c10::DispatchKey::PrivateUse1, result);
  fresh_.push_back(access_of(made, /*write=*/true));
  return made;
}

void Operands::write_back() {
  for (const Shadow& shadow : shadows_) {
    c10::DataPtr& data = shadow.storage->_mutable_data_ptr_no_checks();
    if (data.get() == shadow.data && shadow.storage->nbytes() == shadow.original->nbytes()) {
      continue;
    }
    // The kernel resized the alias. Its new memory replaces the original's, which is freed.
    if (data.get() != shadow.data) {
      label(shadow.storage.get());
      shadow.original->set_data_ptr_noswap(std::move(shadow.storage->_mutable_data_ptr_no_checks()));
    }
    shadow.original->set_nbytes(shadow.storage->nbytes());
  }
  for (const Alias& alias : aliases_) {
    if (!alias.written || alias.cpu.is_nested()) { // no operator changes a nested tensor's sizes in place
      continue;
    }
    if (alias.cpu.is_sparse()) {
      write_back_sparse(alias);
      continue;
    }
    c10::TensorImpl* original = alias.original.unsafeGetTensorImpl();
    if (alias.cpu.storage_offset() != original->storage_offset() || alias.cpu.sizes() != original->sizes() ||
        alias.cpu.strides() != original->strides()) {
      original->set_storage_offset(alias.cpu.storage_offset());
      original->set_sizes_and_strides(alias.cpu.sizes(), alias.cpu.strides());
    }
  }
}

} // namespace torch_uvm::emulated
