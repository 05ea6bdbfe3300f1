#include "tensor/resize.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/resize_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <mutex>

#include "tensor/labels.h"
#include "tensor/managed_storage.h"

namespace torch_uvm {
namespace {

const at::Tensor& resize_cpu(const at::Tensor& self, at::IntArrayRef size,
                             std::optional<at::MemoryFormat> memory_format) {
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
  return at::native::resize_(self, size, memory_format);
}

// PyTorch warns when a kernel takes another's place; here that is meant, and users can do nothing about it.
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

} // namespace

void register_resize_check() {
  static std::once_flag once;
  std::call_once(once, [] {
    Silent silent;
    const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
    // Leaked: deregistering at exit would race with what still runs then.
    auto& library = *new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("resize_", TORCH_FN(resize_cpu));
  });
}

} // namespace torch_uvm
