// Allocates managed tensors, and copies tensors into managed memory.
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>

#include "tensor/moves/moves.h"
#include "tensor/moves/operators.h"
#include "tensor/process/context.h"
#include "tensor/process/switch.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {

at::Tensor empty_strided_managed(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype,
                                 c10::Device device) {
  if (!device.is_cpu()) {
    TORCH_CHECK_VALUE(device.type() == at::getAccelerator(), "managed memory on ", device,
                      "; accepted: the CPU and the accelerator");
    Context::get().runtime(); // on CUDA this installs the allocator that respects the switch
    const ManagedScope on(true);
    at::Tensor tensor = at::empty_strided(size, stride, at::TensorOptions().device(device).dtype(dtype));
    TORCH_CHECK(is_managed(tensor), "managed memory on ", device,
                " inside a graph capture or a memory pool, which decide on the memory in their scope; make the tensor "
                "outside of it");
    return tensor;
  }
  const std::size_t bytes = at::detail::computeStorageNbytes(size, stride, c10::elementSize(dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       allocate_managed(bytes, Location::host(), Stream::host(), device), c10::GetCPUAllocator(),
                       // Growing would allocate from the CPU's allocator, whose memory is not managed.
                       /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return tensor;
}

at::Tensor managed_copy_kernel(const at::Tensor& self, c10::Device to, c10::ScalarType dtype, bool non_blocking,
                               c10::MemoryFormat memory_format) {
  TORCH_CHECK_VALUE(self.layout() == c10::kStrided && !self.is_quantized(), "a managed copy of a tensor of layout ",
                    self.layout(), " and dtype ", self.scalar_type(), "; accepted: strided tensors, not quantised");
  TORCH_CHECK_VALUE(!c10::isQIntType(dtype), "a managed copy of dtype ", dtype,
                    "; accepted: dtypes that are not quantised");
  const c10::Device device = resolve_device(to, "a managed copy");
  const at::Tensor form = at::empty_like(self, at::TensorOptions().device(c10::kMeta).dtype(dtype), memory_format);
  return empty_strided_managed(form.sizes(), form.strides(), dtype, device).copy_(self, non_blocking);
}

at::Tensor managed_copy(const at::Tensor& self, c10::Device device, c10::ScalarType dtype, bool non_blocking,
                        c10::MemoryFormat memory_format) {
  return managed_copy_operator().call(self, device, dtype, non_blocking, memory_format);
}

} // namespace torch_uvm
