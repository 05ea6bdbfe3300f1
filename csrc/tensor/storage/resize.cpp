// Refuses a resize of managed memory that cannot grow before the tensor changes.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/resize_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

void check_resize(const at::Tensor& self, at::IntArrayRef size) {
  const c10::Storage& storage = self.unsafeGetTensorImpl()->unsafe_storage();
  if (storage && !storage.resizable() && is_managed(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks())) {
    const std::size_t bytes = at::detail::computeStorageNbytesContiguous(
        size, self.itemsize(), static_cast<std::size_t>(self.storage_offset()));
    const std::size_t labels = label_count(storage);
    TORCH_CHECK(bytes <= storage.nbytes(), "a resize to ", size, " needs ", bytes, " bytes of managed memory of which ",
                storage.nbytes(), " are there, and ",
                labels > 1 ? "whose other labels would keep the old ones" : "which cannot grow under the CPU's label",
                "; resize a clone()");
  }
}

const at::Tensor& resize_cpu(const at::Tensor& self, at::IntArrayRef size,
                             std::optional<at::MemoryFormat> memory_format) {
  check_resize(self, size);
  return at::native::resize_(self, size, memory_format);
}

// PyTorch's CUDA kernel, saved before it is overridden: this layer does not link to torch_cuda. Leaked, as the library
// is.
const c10::SafeKernelFunction* plain_cuda = nullptr;

const at::Tensor& resize_cuda(const at::Tensor& self, at::IntArrayRef size,
                              std::optional<at::MemoryFormat> memory_format) {
  check_resize(self, size);
  c10::Stack stack{self, size, memory_format};
  plain_cuda->callBoxed(plain_cuda->opHandle(), c10::DispatchKeySet(c10::DispatchKey::CUDA), &stack);
  return self;
}

// Drops PyTorch's warning about an overridden kernel: the override is intended, and users cannot act on the warning.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

} // namespace

void register_resize_check() {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  // Leaked: deregistration at exit would race with threads that are still running.
  auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library.impl("resize_", TORCH_FN(resize_cpu));
  const auto resize = c10::Dispatcher::singleton().findSchemaOrThrow("aten::resize_", "");
  if (resize.hasKernelForDispatchKey(c10::DispatchKey::CUDA)) {
    plain_cuda = new c10::SafeKernelFunction(resize.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA));
    auto& cuda = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
    cuda.impl("resize_", TORCH_FN(resize_cuda));
  }
}

} // namespace torch_uvm
