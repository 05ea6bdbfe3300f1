// The gradient of group normalisation in the operand's memory format, as on the CPU. For every other device PyTorch's
// formula makes the operands contiguous first, which changes the summation order in the kernel.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/native_group_norm.h>
#include <ATen/ops/native_group_norm_backward.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <optional>
#include <tuple>

#include "emulated/kernels.h"

namespace torch_uvm::emulated {
namespace {

using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>; ///< result, mean, rstd

struct Sizes {
  std::int64_t batch, channels, plane, groups;
  double eps;
};

/// Runs the operator with PyTorch's own gradient formula.
Results with_pytorchs_gradient(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                               const Sizes& sizes) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("aten::native_group_norm", "")
                             .typed<decltype(at::native_group_norm_symint)>();
  // AutogradOther has PyTorch's autograd kernel; AutogradPrivateUse1's is replaced by this file.
  c10::DispatchKeySet keys({c10::DispatchKey::AutogradOther, c10::DispatchKey::PrivateUse1});
  const c10::impl::LocalDispatchKeySet local = c10::impl::tls_local_dispatch_key_set();
  if ((local.included_ - local.excluded_).has(c10::DispatchKey::Python)) { // modes of torch_dispatch see the operator
    keys = keys.add(c10::DispatchKey::Python);
  }
  return op.redispatch(keys, input, weight, bias, sizes.batch, sizes.channels, sizes.plane, sizes.groups, sizes.eps);
}

struct InMemoryFormat : torch::autograd::Function<InMemoryFormat> {
  static variable_list forward(torch::autograd::AutogradContext* ctx, const at::Tensor& input,
                               const OptionalTensor& weight, const OptionalTensor& bias, const Sizes& sizes) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [result, mean, rstd] =
        at::native_group_norm(input, weight, bias, sizes.batch, sizes.channels, sizes.plane, sizes.groups, sizes.eps);
    ctx->set_materialize_grads(false); // backward has to see which gradients are undefined
    ctx->save_for_backward({input, weight.value_or(at::Tensor()), bias.value_or(at::Tensor()), mean, rstd});
    ctx->saved_data["sizes"] = c10::List<std::int64_t>({sizes.batch, sizes.channels, sizes.plane, sizes.groups});
    ctx->saved_data["eps"] = sizes.eps;
    return {result, mean, rstd};
  }

  static variable_list backward(torch::autograd::AutogradContext* ctx, variable_list gradients) {
    const variable_list saved = ctx->get_saved_variables();
    const auto list = ctx->saved_data["sizes"].toIntVector();
    const Sizes sizes{list[0], list[1], list[2], list[3], ctx->saved_data["eps"].toDouble()};
    const variable_list inputs{saved[0], saved[1], saved[2]};
    variable_list results;
    if (at::GradMode::is_enabled() || gradients[1].defined() || gradients[2].defined()) {
      results = by_pytorch(inputs, gradients, sizes);
    } else if (gradients[0].defined()) {
      const auto wanted = [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); };
      const c10::MemoryFormat format = saved[0].suggest_memory_format();
      auto [input, weight, bias] =
          at::native_group_norm_backward(gradients[0].contiguous(format), saved[0].contiguous(format), saved[3],
                                         saved[4], optional(saved[1]), sizes.batch, sizes.channels, sizes.plane,
                                         sizes.groups, {wanted(inputs[0]), wanted(inputs[1]), wanted(inputs[2])});
      results = {input, weight, bias};
    } else {
      results.resize(inputs.size());
    }
    results.emplace_back(); // for the argument `sizes`
    return results;
  }

 private:
  static OptionalTensor optional(const at::Tensor& tensor) {
    return tensor.defined() ? std::optional(tensor) : std::nullopt;
  }

  /// Handles double backward and gradients of mean and rstd, which the kernel does not support.
  static variable_list by_pytorch(const variable_list& inputs, const variable_list& gradients, const Sizes& sizes) {
    const bool create_graph = at::GradMode::is_enabled();
    variable_list results(inputs.size());
    variable_list wanted;
    variable_list outputs;
    variable_list of_outputs;
    {
      const at::AutoGradMode recorded(true);
      const auto [result, mean, rstd] =
          with_pytorchs_gradient(inputs[0], optional(inputs[1]), optional(inputs[2]), sizes);
      const std::array<at::Tensor, 3> all{result, mean, rstd};
      for (std::size_t i = 0; i < all.size(); ++i) {
        if (gradients[i].defined()) {
          outputs.push_back(all[i]);
          of_outputs.push_back(gradients[i]);
        }
      }
    }
    for (const at::Tensor& input : inputs) {
      if (input.defined() && input.requires_grad()) {
        wanted.push_back(input);
      }
    }
    if (outputs.empty() || wanted.empty()) {
      return results;
    }
    const variable_list found = torch::autograd::grad(outputs, wanted, of_outputs, /*retain_graph=*/true, create_graph,
                                                      /*allow_unused=*/true);
    auto next = found.begin();
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].defined() && inputs[i].requires_grad()) {
        results[i] = *next++;
      }
    }
    return results;
  }
};

Results native_group_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                          c10::SymInt batch, c10::SymInt channels, c10::SymInt plane, std::int64_t groups, double eps) {
  const Sizes sizes{batch.expect_int(), channels.expect_int(), plane.expect_int(), groups, eps};
  if (!at::GradMode::is_enabled() || input.suggest_memory_format() == c10::MemoryFormat::Contiguous) {
    return with_pytorchs_gradient(input, weight, bias, sizes);
  }
  const variable_list results = InMemoryFormat::apply(input, weight, bias, sizes);
  return {results[0], results[1], results[2]};
}

} // namespace

void register_group_norm_backward(torch::Library& autograd) {
  autograd.impl("native_group_norm", TORCH_FN(native_group_norm));
}

} // namespace torch_uvm::emulated
