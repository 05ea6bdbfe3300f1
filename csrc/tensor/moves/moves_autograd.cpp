// The autograd kernels of moves and managed copies: graph nodes and views, as PyTorch's own operators make them.
//
// They do not use torch::autograd::Function, which raises under torch.func transforms. Those expect a kernel that makes
// a node and redispatches to the next key.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/real.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <memory>
#include <type_traits>
#include <utility>

#include "tensor/moves/moves.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

/// Makes `result` the output of a new node whose input is `self`. Nodes are owned by an intrusive_ptr from torch 2.12
/// on, by a shared_ptr before.
template <class T>
void set_backward(const at::Tensor& result, const at::Tensor& self) {
  const auto node = [&] {
    if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
      return c10::make_intrusive<T>(self);
    } else {
      return std::shared_ptr<T>(new T(self), [](T* made) { deleteNode(made); });
    }
  }();
  node->set_next_edges(torch::autograd::collect_next_edges(self));
  torch::autograd::set_history(result, node);
}

/// Whether no other tensor shares these bytes. True for wrappers without storage: their writes are not in place.
bool has_bytes_to_itself(const at::Tensor& tensor) {
  return !tensor.has_storage() || (tensor.use_count() == 1 && tensor.storage().use_count() == 1);
}

/// Moves the gradient back to the device of the forward input.
struct MoveBackward final : Node {
  explicit MoveBackward(const at::Tensor& self) : device(self.device()) {}

  variable_list apply(variable_list&& gradients) override {
    at::Tensor gradient = std::move(gradients[0]);
    if (!gradient.defined() || gradient.device() == device || !should_compute_output(0)) {
      return {gradient};
    }
    // Move only an unshared gradient. Gradients are accumulated in place, and another owner (a hook, another input of
    // the same sum) would see that through the other label.
    if (is_managed(gradient) && has_bytes_to_itself(gradient)) {
      return {move(gradient, device, /*non_blocking=*/false)};
    }
    return {gradient.to(device)};
  }
  std::string name() const override {
    return "torch_uvm::MoveBackward";
  }

  const c10::Device device;
};

/// Copies the gradient back to the device and dtype of the forward input.
struct ManagedCopyBackward final : Node {
  explicit ManagedCopyBackward(const at::Tensor& self) : device(self.device()), dtype(self.scalar_type()) {}

  variable_list apply(variable_list&& gradients) override {
    at::Tensor gradient = std::move(gradients[0]);
    if (!gradient.defined() || !should_compute_output(0)) {
      return {gradient};
    }
    if (gradient.is_complex() && !c10::isComplexType(dtype)) {
      gradient = at::real(gradient);
    }
    return {gradient.to(device, dtype)};
  }
  std::string name() const override {
    return "torch_uvm::ManagedCopyBackward";
  }

  const c10::Device device;
  const c10::ScalarType dtype;
};

} // namespace

at::Tensor move_for_module(const at::Tensor& self, c10::Device device, bool non_blocking) {
  if (torch::autograd::compute_requires_grad(self) || torch::autograd::isFwGradDefined(self)) {
    return move(self, device, non_blocking);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return move(self, device, non_blocking);
}

at::Tensor move_autograd(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device, bool non_blocking) {
  const bool requires_grad = torch::autograd::compute_requires_grad(self);
  const bool has_tangent = torch::autograd::isFwGradDefined(self);
  at::Tensor moved;
  {
    const at::AutoDispatchBelowAutograd below;
    moved = move_operator().redispatch(keys & c10::after_autograd_keyset, self, device, non_blocking);
  }
  if (requires_grad) {
    set_backward<MoveBackward>(moved, self);
  }
  if (has_tangent) {
    const at::Tensor tangent = self._fw_grad(/*level=*/0);
    // Do not copy the tangent: the copy would go stale silently when the tensor is written through its other label.
    TORCH_CHECK_VALUE(is_managed(tangent),
                      "a move of a managed tensor whose tangent is not managed; make it so: "
                      "tangent.to(tangent.device, managed=True), or run under torch_uvm.enabled()");
    moved._set_fw_grad(move(tangent, device, non_blocking), /*level=*/0, /*is_inplace_op=*/false);
  }
  return moved;
}

at::Tensor managed_copy_autograd(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device,
                                 c10::ScalarType dtype, bool non_blocking, c10::MemoryFormat memory_format) {
  const bool differentiable = torch::autograd::isDifferentiableType(dtype);
  const bool requires_grad = differentiable && torch::autograd::compute_requires_grad(self);
  const bool has_tangent = differentiable && torch::autograd::isFwGradDefined(self);
  at::Tensor copy;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    copy = managed_copy_operator().redispatch(keys & c10::after_autograd_keyset, self, device, dtype, non_blocking,
                                              memory_format);
  }
  if (requires_grad) {
    set_backward<ManagedCopyBackward>(copy, self);
  }
  if (has_tangent) {
    copy._set_fw_grad(
        managed_copy_operator().call(self._fw_grad(/*level=*/0), device, dtype, non_blocking, memory_format),
        /*level=*/0, /*is_inplace_op=*/false);
  }
  return copy;
}

} // namespace torch_uvm
