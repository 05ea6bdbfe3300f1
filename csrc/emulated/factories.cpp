// Operators that create tensors or change their storage.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include "emulated/backend.h"
#include "emulated/kernels.h"
#include "emulated/memory.h"
#include "tensor/dispatch/kernels.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm::emulated {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

void check_options(std::optional<c10::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK_NOT_IMPLEMENTED(c10::layout_or_default(layout) == c10::Layout::Strided, "layout ",
                              c10::layout_or_default(layout),
                              " on the emulated accelerator, which has strided and sparse COO tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin_memory), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin_memory,
                 std::optional<c10::MemoryFormat> memory_format) {
  check_options(layout, pin_memory);
  const c10::OptionalDeviceGuard current(device);
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), memory_format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  const c10::OptionalDeviceGuard current(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

// Forward-mode AD's immutable zeros. Other backends allocate no memory for them; here they are ordinary zeros.
at::Tensor efficient_zeros(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                           std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                           std::optional<bool> pin_memory) {
  return at::zeros(size, dtype, layout, device, pin_memory);
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size,
                          std::optional<c10::MemoryFormat> memory_format) {
  const c10::OptionalDeviceGuard current(self.device());
  // Checked first: at::native::resize_ sets the sizes before it finds that the storage cannot grow.
  const std::size_t needed = at::detail::computeStorageNbytesContiguous(
      size, self.itemsize(), static_cast<std::size_t>(self.storage_offset()));
  TORCH_CHECK(self.storage().resizable() || needed <= self.storage().nbytes(),
              "Trying to resize storage that is not resizable");
  if (needed > self.storage().nbytes()) {
    // In stream order. at::native::resize_ would copy the old bytes at once, before pending work of the stream.
    at::native::resize_bytes_nocuda(self.storage(), static_cast<std::int64_t>(needed));
  }
  return at::native::resize_(self, size, memory_format);
}

at::Tensor& set_storage_offset(at::Tensor& self, c10::Storage storage, std::int64_t offset, c10::IntArrayRef size,
                               c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, storage, offset, size, stride);
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  const std::size_t needed = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), self.itemsize(),
                                                              static_cast<std::size_t>(offset));
  if (self.numel() != 0 && needed > self.storage().nbytes()) {
    const c10::OptionalDeviceGuard current(self.device());
    at::native::resize_bytes_nocuda(self.storage(), static_cast<std::int64_t>(needed));
  }
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::OptionalDeviceGuard current(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator(), /*resizable=*/true);
  return set_storage_offset(self, std::move(storage), 0, {0}, {});
}

void record_stream_of(at::Tensor& self, c10::Stream stream) {
  Kernel kernel; // pins the block until the stream is recorded
  kernel.use(self.storage().unsafeGetStorageImpl(), /*writes=*/false);
  record_stream(self.storage().data_ptr(), from_torch(stream));
}

// `parameter.data = other` and so Module.to ask this. With true, parameters keep their identity and stay tied, as
// between the CPU and CUDA. PyTorch's default for PrivateUse1 is false.
bool can_take_the_place_of(const at::Tensor& self, const at::Tensor& from) {
  static constexpr c10::DispatchKeySet kDense({c10::BackendComponent::CPUBit, c10::BackendComponent::PrivateUse1Bit});
  const auto plain = [](const at::Tensor& tensor) {
    const c10::DispatchKeySet keys = tensor.key_set();
    return keys.has_any(kDense) && keys.has(c10::DispatchKey::Dense);
  };
  return (plain(self) && plain(from)) || self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set());
}

} // namespace

void register_factories(torch::Library& aten) {
  aten.impl("empty.memory_format", TORCH_FN(empty));
  aten.impl("empty_strided", TORCH_FN(empty_strided));
  aten.impl("_efficientzerotensor", TORCH_FN(efficient_zeros));
  aten.impl("resize_", TORCH_FN(resize_));
  aten.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  aten.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  aten.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  aten.impl("set_", TORCH_FN(set_nothing));
  aten.impl("_has_compatible_shallow_copy_type", TORCH_FN(can_take_the_place_of));
  aten.impl("record_stream", TORCH_FN(record_stream_of));
}

} // namespace torch_uvm::emulated
