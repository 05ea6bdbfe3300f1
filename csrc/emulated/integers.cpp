// Integer operators that CUDA supports and the CPU does not. Programs that avoid them on the CPU test for the device
// type "cpu", so they use them on every other device.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/histc.h>

#include "emulated/fallback.h"
#include "emulated/kernels.h"

namespace torch_uvm::emulated {
namespace {

/// Computes integers as doubles, which are exact up to 2^53. The counts have the operand's dtype.
at::Tensor histc(const at::Tensor& self, std::int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  if (c10::isIntegralType(self.scalar_type(), /*includeBool=*/false)) {
    return at::histc(self.to(c10::kDouble), bins, min, max).to(self.scalar_type());
  }
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::histc", "");
  torch::jit::Stack stack{self, bins, min, max};
  cpu_kernel_fallback(op, &stack);
  return stack.back().toTensor();
}

at::Tensor& histc_out(const at::Tensor& self, std::int64_t bins, const at::Scalar& min, const at::Scalar& max,
                      at::Tensor& out) {
  const at::Tensor counts = at::histc(self, bins, min, max);
  TORCH_CHECK(out.scalar_type() == counts.scalar_type(), "histc of ", self.scalar_type(), " with an out of ",
              out.scalar_type(), "; accepted: the same dtype");
  return out.resize_(counts.sizes()).copy_(counts);
}

} // namespace

void register_integer_kernels(torch::Library& aten) {
  aten.impl("histc", TORCH_FN(histc));
  aten.impl("histc.out", TORCH_FN(histc_out));
}

} // namespace torch_uvm::emulated
