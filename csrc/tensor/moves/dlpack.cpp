#include "tensor/moves/dlpack.h"

#include <ATen/DLConvertor.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <type_traits>
#include <vector>

#include "tensor/dispatch/pins.h"
#include "tensor/moves/moves.h"
#include "tensor/process/context.h"
#include "tensor/storage/adopted_storage.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

template <class T>
constexpr bool kVersioned = std::is_same_v<T, DLManagedTensorVersioned>;

/// An exported tensor. It is pinned, because the consumer has its address.
template <class T>
struct Export {
  explicit Export(const at::Tensor& exported) : tensor(exported.detach()), sizes(exported.sizes().vec()) {
    keep_resident(tensor, true); // last: if it throws, there is nothing to unpin
  }
  ~Export() {
    try {
      keep_resident(tensor, false);
    } catch (const std::exception&) {
      // It stays pinned until it is freed.
    }
  }
  Export(const Export&) = delete;
  Export& operator=(const Export&) = delete;

  T given{};
  at::Tensor tensor;
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
};

template <class T>
void delete_export(T* given) {
  delete static_cast<Export<T>*>(given->manager_ctx);
}

template <class T>
struct Borrowed {
  T* source;
  c10::Device device; // its current stream may still use the bytes
};

/// Waits for the current stream before the producer gets its bytes back: the producer does not know our streams.
void finish_work(c10::Device device) noexcept {
  if (device.is_cpu() || Context::get().forked()) {
    return;
  }
  try {
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream stream = guard.getStream(device);
    if (!guard.queryStream(stream)) {
      guard.synchronizeStream(stream);
    }
  } catch (const std::exception&) {
    // A deleter cannot report the error.
  }
}

template <class T>
void release_source(void* pointer) {
  const std::unique_ptr<Borrowed<T>> borrowed(static_cast<Borrowed<T>*>(pointer));
  finish_work(borrowed->device);
  if (borrowed->source->deleter != nullptr) {
    borrowed->source->deleter(borrowed->source);
  }
}

at::ScalarType scalar_type_of(const DLDataType& dtype) {
  TORCH_CHECK_BUFFER(dtype.lanes == 1, "a DLPack tensor whose elements have ", dtype.lanes, " lanes; accepted: 1");
  try {
    return at::toScalarType(dtype);
  } catch (const c10::Error& error) {
    TORCH_CHECK_BUFFER(false, "a DLPack tensor of type code ", int{dtype.code}, " with ", int{dtype.bits},
                       " bits; accepted: the types that PyTorch has (", error.what_without_backtrace(), ")");
  }
}

std::vector<std::int64_t> sizes_of(const DLTensor& described) {
  TORCH_CHECK_BUFFER(described.ndim >= 0, "a DLPack tensor of ", described.ndim, " dimensions; accepted: 0 or more");
  TORCH_CHECK_BUFFER(described.ndim == 0 || described.shape != nullptr, "a DLPack tensor of ", described.ndim,
                     " dimensions without a shape");
  std::vector<std::int64_t> sizes(described.shape, described.shape + described.ndim);
  for (const std::int64_t size : sizes) {
    TORCH_CHECK_BUFFER(size >= 0, "a DLPack tensor with the size ", size, "; accepted: 0 or more");
  }
  return sizes;
}

std::vector<std::int64_t> strides_of(const DLTensor& described, const std::vector<std::int64_t>& sizes) {
  if (described.strides != nullptr) {
    std::vector<std::int64_t> strides(described.strides, described.strides + described.ndim);
    for (const std::int64_t stride : strides) {
      TORCH_CHECK_BUFFER(stride >= 0, "a DLPack tensor with the stride ", stride, "; accepted: 0 or more");
    }
    return strides;
  }
  std::vector<std::int64_t> strides(sizes.size());
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    TORCH_CHECK_BUFFER(!__builtin_mul_overflow(stride, std::max<std::int64_t>(sizes[i], 1), &stride),
                       "a DLPack tensor of more elements than can be counted");
  }
  return strides;
}

std::size_t bytes_of(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides,
                     std::size_t item) {
  try {
    return at::detail::computeStorageNbytes(sizes, strides, item);
  } catch (const c10::Error&) {
    TORCH_CHECK_BUFFER(false, "a DLPack tensor of more bytes than can be counted");
  }
}

} // namespace

template <class T>
T* export_managed(const at::Tensor& tensor, std::int32_t device_id, bool copied) {
  TORCH_CHECK_BUFFER(tensor.layout() == c10::kStrided && is_managed(data_of(tensor.storage())),
                     "DLPack's device type for managed memory, for a tensor that is not managed");
  TORCH_CHECK_BUFFER(!is_adopted(data_behind_labels(data_of(tensor.storage()))),
                     "DLPack's device type for managed memory, for a tensor in a file's mapping, which CUDA did not "
                     "allocate; clone() it");
  TORCH_CHECK_BUFFER(!tensor.is_conj() && !tensor.is_neg(),
                     "a tensor with its conjugate or negative bit set; resolve_conj() and resolve_neg() clear them");
  auto made = std::make_unique<Export<T>>(tensor);
  made->strides = tensor.strides().vec();
  for (std::size_t i = 0; i < made->sizes.size(); ++i) {
    if (made->sizes[i] < 2) {
      made->strides[i] = 1; // as PyTorch does: some consumers test contiguity by the strides alone
    }
  }
  DLTensor& described = made->given.dl_tensor;
  described.data = tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
  described.device = {kDLCUDAManaged, device_id};
  described.ndim = static_cast<std::int32_t>(tensor.dim());
  described.dtype = at::getDLDataType(tensor);
  described.shape = made->sizes.data();
  described.strides = made->strides.data();
  described.byte_offset = 0;
  if constexpr (kVersioned<T>) {
    made->given.version = {DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION};
    made->given.flags = copied ? DLPACK_FLAG_BITMASK_IS_COPIED : 0;
  }
  made->given.manager_ctx = made.get();
  made->given.deleter = &delete_export<T>;
  return &made.release()->given;
}

template <class T>
at::Tensor import_managed(T* source, c10::Device device, bool read_only_too) {
  if constexpr (kVersioned<T>) {
    TORCH_CHECK_BUFFER(source->version.major == DLPACK_MAJOR_VERSION, "a DLPack tensor of version ",
                       source->version.major, ".", source->version.minor, "; accepted: ", DLPACK_MAJOR_VERSION, ".x");
    TORCH_CHECK_BUFFER(read_only_too || (source->flags & DLPACK_FLAG_BITMASK_READ_ONLY) == 0,
                       "a DLPack tensor that is read-only, which PyTorch's tensors cannot be; copy=True copies it");
  }
  const DLTensor& described = source->dl_tensor;
  TORCH_CHECK_BUFFER(described.device.device_type == kDLCUDAManaged, "a DLPack tensor of device type ",
                     static_cast<int>(described.device.device_type), "; accepted: 13, managed memory");
  if (source->deleter == &delete_export<T>) {
    const at::Tensor exported = static_cast<Export<T>*>(source->manager_ctx)->tensor;
    // Move before releasing `source`: if the move throws, the caller still owns it.
    at::Tensor back = exported.device() == device ? exported.detach() : move(exported, device, /*non_blocking=*/false);
    source->deleter(source);
    return back;
  }
  const at::ScalarType type = scalar_type_of(described.dtype);
  const std::size_t item = c10::elementSize(type);
  const std::vector<std::int64_t> sizes = sizes_of(described);
  const std::vector<std::int64_t> strides = strides_of(described, sizes);
  const std::size_t bytes = bytes_of(sizes, strides, item);
  TORCH_CHECK_BUFFER(bytes == 0 || described.data != nullptr, "a DLPack tensor of ", bytes,
                     " bytes without an address");
  char* data = bytes == 0 ? nullptr : static_cast<char*>(described.data) + described.byte_offset;
  const std::size_t alignment = c10::isComplexType(type) ? item / 2 : item;
  TORCH_CHECK_BUFFER(reinterpret_cast<std::uintptr_t>(data) % alignment == 0, "a DLPack tensor of ", type,
                     " at an address that is no multiple of ", alignment);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, c10::DataPtr(data, nullptr, nullptr, device),
      device.is_cpu() ? c10::GetCPUAllocator() : c10::GetAllocator(device.type()), /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::computeDispatchKey(type, std::nullopt, device)),
      c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  // Last, when nothing can throw any more: from here on the storage owns the source.
  auto borrowed = std::make_unique<Borrowed<T>>(Borrowed<T>{source, device});
  storage->set_data_ptr_noswap(c10::DataPtr(data, borrowed.release(), &release_source<T>, device));
  return tensor;
}

template DLManagedTensor* export_managed(const at::Tensor&, std::int32_t, bool);
template DLManagedTensorVersioned* export_managed(const at::Tensor&, std::int32_t, bool);
template at::Tensor import_managed(DLManagedTensor*, c10::Device, bool);
template at::Tensor import_managed(DLManagedTensorVersioned*, c10::Device, bool);

} // namespace torch_uvm
