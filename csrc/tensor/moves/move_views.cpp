// The autograd view of a moved tensor: a view of the source's base.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/alias.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tensor/moves/moves.h"
#include "tensor/storage/managed_storage.h"

namespace torch_uvm {
namespace {

using torch::autograd::CreationMeta;
using torch::autograd::ViewFunc;
using torch::autograd::ViewInfo;

using Symbols = std::optional<std::vector<c10::SymInt>>;
using Tensors = std::optional<std::vector<at::Tensor>>;
/// Maps a view back to its base: ViewInfo's reverse view function.
using Undo = std::function<at::Tensor(const at::Tensor&)>;

struct Geometry {
  explicit Geometry(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()), strides(tensor.strides().vec()), offset(tensor.storage_offset()) {}

  at::Tensor on(const at::Tensor& tensor) const {
    return tensor.as_strided(sizes, strides, offset);
  }

  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset;
};

struct StridedAgain final : ViewFunc {
  explicit StridedAgain(Geometry geometry) : geometry(std::move(geometry)) {}

  at::Tensor operator()(const at::Tensor& base) const override {
    return geometry.on(base);
  }
  std::unique_ptr<ViewFunc> clone_and_set(Symbols /*symints*/, Tensors /*tensors*/) const override {
    return std::make_unique<StridedAgain>(geometry);
  }

  const Geometry geometry;
};

/// How a tensor was made from its base before it was moved. The functions are empty if it is the base.
struct Before {
  Before copy(Symbols symints = {}, Tensors tensors = {}) const {
    return {again ? again->clone_and_set(std::move(symints), std::move(tensors)) : nullptr, undo, device};
  }

  std::unique_ptr<ViewFunc> again;
  Undo undo;
  c10::Device device; ///< the label before the move
};

/// Regenerates the view from its base, which autograd does after an in-place write to the base.
struct MoveAgain final : ViewFunc {
  MoveAgain(Before before, c10::Device device) : before(std::move(before)), device(device) {}

  std::vector<c10::SymInt> get_symints() const override {
    return before.again ? before.again->get_symints() : std::vector<c10::SymInt>();
  }
  std::size_t num_symints() const override {
    return before.again ? before.again->num_symints() : 0;
  }
  std::vector<at::Tensor> get_tensors() const override {
    return before.again ? before.again->get_tensors() : std::vector<at::Tensor>();
  }
  std::size_t num_tensors() const override {
    return before.again ? before.again->num_tensors() : 0;
  }

  at::Tensor operator()(const at::Tensor& base) const override {
    at::Tensor source = before.again ? (*before.again)(base) : base;
    if (source.device() == device) { // moved back to its first label
      return before.again ? source : at::alias(source);
    }
    TORCH_CHECK_VALUE(is_managed(source),
                      "a write in place through a moved view cannot be differentiated here, as autograd's own memory "
                      "for it is not managed; write through the tensor that was moved, or out of place");
    return move(source, device, /*non_blocking=*/false);
  }
  std::unique_ptr<ViewFunc> clone_and_set(Symbols symints, Tensors tensors) const override {
    return std::make_unique<MoveAgain>(before.copy(std::move(symints), std::move(tensors)), device);
  }

  const Before before;
  const c10::Device device;
};

bool has_plain_strides(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return tensor.has_storage() && impl->support_as_strided() && !impl->is_python_dispatch() &&
         !impl->has_symbolic_sizes_strides();
}

/// Whether as_strided alone, and a device label, can make `view` from `base`.
bool is_strided_view(const at::Tensor& base, const at::Tensor& view) {
  return has_plain_strides(base) && has_plain_strides(view) && base.scalar_type() == view.scalar_type() &&
         base.is_conj() == view.is_conj() && base.is_neg() == view.is_neg();
}

/// \param of_self the view info of `self`; nullptr if it is not a view
ViewInfo info_of(const ViewInfo* of_self, const at::Tensor& self, const at::Tensor& moved) {
  const c10::Device here = self.device();
  Before before{nullptr, nullptr, here};
  at::Tensor base = of_self == nullptr ? self : of_self->base_;
  if (of_self != nullptr) {
    if (is_strided_view(base, self)) {
      before = {std::make_unique<StridedAgain>(Geometry(self)),
                [whole = Geometry(base)](const at::Tensor& view) { return whole.on(view); }, base.device()};
    } else if (const auto* earlier = dynamic_cast<const MoveAgain*>(of_self->view_fn_.get())) {
      before = earlier->before.copy();
    } else if (of_self->has_view_fn()) {
      before = {of_self->view_fn().clone_and_set(), of_self->rev_view_fn(), here};
    } else { // without a view function: PyTorch uses as_strided
      return of_self->chain(self, moved, std::make_unique<MoveAgain>(std::move(before), moved.device()),
                            [here](const at::Tensor& view) { return move(view, here, /*non_blocking=*/false); });
    }
  }
  Undo undo = [from = before.device, undo = before.undo](const at::Tensor& view) {
    const at::Tensor back = move(view, from, /*non_blocking=*/false);
    return undo ? undo(back) : back;
  };
  return {std::move(base), std::make_unique<MoveAgain>(std::move(before), moved.device()), std::move(undo)};
}

/// The creation meta decides whether autograd accepts in-place writes to the view. Autograd itself refuses them for a
/// view of a leaf that requires grad. For a view of a non-leaf it would propagate the write to the base, which the
/// contract of `move` forbids, so that case is marked as well.
CreationMeta creation_of_view(const at::Tensor& self) {
  if (c10::InferenceMode::is_enabled()) {
    return CreationMeta::INFERENCE_MODE;
  }
  if (!at::GradMode::is_enabled()) {
    return CreationMeta::NO_GRAD_MODE;
  }
  const at::Tensor base = self.is_view() ? at::Tensor(self._base()) : self;
  return base.requires_grad() && !base.is_leaf() ? CreationMeta::IN_CUSTOM_FUNCTION : CreationMeta::DEFAULT;
}

/// Makes `moved` a differentiable view of `self`, or of the base of `self` if that is a view.
///
/// PyTorch's as_view would chain each move onto the view function of `self`, and copy the chain: a tensor that is moved
/// back and forth would get slower with each move, and in the end overflow the stack. Here the view function stays as
/// short as that of a view that was never moved.
/// \param moved the result of the move kernel for `self`, not used by anything else yet
at::Tensor as_moved_view(const at::Tensor& self, const at::Tensor& moved) {
  if (self.is_inference()) {
    return moved;
  }
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(self);
  const bool is_view = meta != nullptr && meta->has_bw_view();
  CreationMeta creation = creation_of_view(self);
  if (is_view) {
    creation = torch::autograd::propagate_creation_meta(meta->get_creation_meta(), creation);
  }
  // A detached tensor is a view for forward-mode gradients only.
  const bool shared = meta == nullptr || meta->shared_view_info();
  std::optional<ViewInfo> forward;
  if (!shared) {
    forward.emplace(info_of(meta->has_fw_view() ? &meta->get_forward_view() : nullptr, self, moved));
  }
  return torch::autograd::make_variable_differentiable_view(
      moved, info_of(is_view ? &meta->get_backward_view() : nullptr, self, moved), std::move(forward), shared,
      creation);
}

} // namespace

at::Tensor move_view(c10::DispatchKeySet keys, const at::Tensor& self, c10::Device device, bool non_blocking) {
  at::Tensor moved;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    moved = move_operator().redispatch(keys & c10::after_ADInplaceOrView_keyset, self, device, non_blocking);
  }
  return as_moved_view(self, moved);
}

} // namespace torch_uvm
