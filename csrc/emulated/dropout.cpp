// Dropout as on the CPU. PyTorch uses the fused native_dropout for every PrivateUse1 device. Its roundings come in
// another order, so in low precisions its results differ from the CPU's in the last bit.
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>

#include "emulated/kernels.h"

namespace torch_uvm::emulated {
namespace {

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.sym_numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  at::Tensor kept = at::empty_like(input);
  kept.bernoulli_(1 - p);
  kept.div_(1 - p);
  return input.mul(kept);
}

} // namespace

void register_dropout(torch::Library& autograd, torch::Library& aten) {
  autograd.impl("dropout", TORCH_FN(dropout));
  aten.impl("dropout", TORCH_FN(dropout));
}

} // namespace torch_uvm::emulated
