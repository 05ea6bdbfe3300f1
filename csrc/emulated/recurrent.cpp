// LSTM, GRU and plain recurrent layers.
//
// PyTorch picks their implementation by device inside composite operators: the CPU's own (oneDNN for
// LSTM; cells whose input products are made beforehand for the others), and for any PrivateUse1 device
// fused cells that no CPU kernel exists for.
// To run what the CPU runs, to the last bit, the whole operator runs on CPU aliases with a graph of its
// own there, and one node on our side hands gradients across. Like cuDNN's, these operators can be
// differentiated once.
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "emulated/backend.h"
#include "emulated/fallback.h"
#include "emulated/generator.h"
#include "emulated/kernels.h"
#include "emulated/memory.h"

namespace torch_uvm::emulated {
namespace {

using torch::autograd::variable_list;

std::span<const Touch> view(const c10::SmallVectorImpl<Touch>& accesses) {
  return {accesses.data(), accesses.size()};
}

/// While it lives, autocast of the CPU is what autocast of the accelerator was.
class AutocastOnCpu {
 public:
  AutocastOnCpu()
      : enabled_(at::autocast::is_autocast_enabled(c10::kCPU)), dtype_(at::autocast::get_autocast_dtype(c10::kCPU)) {
    at::autocast::set_autocast_enabled(c10::kCPU, at::autocast::is_autocast_enabled(kDeviceType));
    at::autocast::set_autocast_dtype(c10::kCPU, at::autocast::get_autocast_dtype(kDeviceType));
  }
  ~AutocastOnCpu() {
    at::autocast::set_autocast_enabled(c10::kCPU, enabled_);
    at::autocast::set_autocast_dtype(c10::kCPU, dtype_);
  }
  AutocastOnCpu(const AutocastOnCpu&) = delete;
  AutocastOnCpu& operator=(const AutocastOnCpu&) = delete;

 private:
  bool enabled_;
  c10::ScalarType dtype_;
};

/// A tensor of ours whose bytes the CPU's graph may have saved under the CPU's label.
class Saved {
 public:
  Saved(const at::Tensor& ours, const at::Tensor& cpu) : ours_(ours.storage()), cpu_(cpu.storage()) {
    const Touch access = access_of(ours, false);
    if (access.bytes != 0) {
      offset_ = static_cast<const char*>(access.ptr) - static_cast<const char*>(ours_.data());
      bytes_ = access.bytes;
    }
  }

  /// Between forward and backward a storage may get other memory: programs that shard parameters free and
  /// fill it again. Whoever saved the tensor itself sees that; a pointer to its bytes has to be told.
  void follow() {
    if (ours_.data() == cpu_.data()) {
      return;
    }
    TORCH_CHECK(ours_.nbytes() >= cpu_.nbytes(), "a tensor that a recurrent layer saved for backward had ",
                cpu_.nbytes(), " bytes, and now its storage has ", ours_.nbytes());
    cpu_.unsafeGetStorageImpl()->set_data_ptr_noswap({const_cast<void*>(ours_.data()), new c10::Storage(ours_),
                                                      [](void* kept) { delete static_cast<c10::Storage*>(kept); },
                                                      c10::Device(c10::DeviceType::CPU)});
  }

  Touch access() const {
    return bytes_ == 0 ? Touch{} : Touch{static_cast<const char*>(ours_.data()) + offset_, bytes_, false};
  }

 private:
  c10::Storage ours_;
  c10::Storage cpu_;
  std::ptrdiff_t offset_ = 0;
  std::size_t bytes_ = 0;
};

struct CpuGraphBackward final : torch::autograd::Node {
  int device = 0;
  variable_list cpu_inputs; ///< leaves of the CPU's graph, one for each edge of this node
  variable_list cpu_outputs;
  std::vector<Saved> saved_inputs;
  std::vector<Saved> saved_outputs;

  std::string name() const override {
    return "EmuRecurrentBackward";
  }

  variable_list apply(variable_list&& gradients) override {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !at::GradMode::is_enabled(),
        "Recurrent layers on the emulated accelerator can be differentiated once only (as with cuDNN)");
    TORCH_CHECK(!cpu_outputs.empty(), "Trying to backward through the graph a second time, but its buffers were freed");
    const Stream stream = current_stream(device);
    Operands operands(device);
    c10::SmallVector<Touch, 8> accesses;
    for (Saved& output : saved_outputs) {
      output.follow();
    }
    for (Saved& input : saved_inputs) {
      input.follow();
      accesses.push_back(input.access());
    }
    variable_list outputs;
    variable_list cpu_gradients;
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (gradients[i].defined()) {
        accesses.push_back(access_of(gradients[i], false));
        outputs.push_back(cpu_outputs[i]);
        cpu_gradients.push_back(operands.to_cpu(gradients[i], false));
      }
    }
    if (outputs.empty()) {
      return variable_list(cpu_inputs.size());
    }
    check_not_forked();
    runtime().begin_kernel(stream, view(accesses));
    variable_list results;
    {
      const AllocationScope on_device(device);
      results = torch::autograd::grad(outputs, cpu_inputs, cpu_gradients, /*retain_graph=*/true, /*create_graph=*/false,
                                      /*allow_unused=*/true);
    }
    for (at::Tensor& result : results) {
      result = operands.to_device(result);
    }
    runtime().end_kernel(stream, {operands.fresh().data(), operands.fresh().size()});
    return results;
  }

  void release_variables() override {
    cpu_inputs.clear();
    cpu_outputs.clear();
    saved_inputs.clear();
    saved_outputs.clear();
  }
};

/// A node under the kind of pointer that this torch keeps nodes by: intrusive since 2.13.
template <class NodeType>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, NodeType>) {
    return c10::make_intrusive<NodeType>();
  } else {
    return std::shared_ptr<NodeType>(new NodeType(), [](NodeType* node) { deleteNode(node); });
  }
}

struct Forward {
  Operands operands;
  c10::SmallVector<Touch, 8> accesses;
  variable_list differentiable; ///< our tensors that want a gradient
  variable_list cpu_inputs; ///< their CPU aliases
  std::vector<Saved> saved;

  explicit Forward(int device) : operands(device) {}

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kDeviceType) {
      return tensor;
    }
    accesses.push_back(access_of(tensor, false));
    at::Tensor cpu = operands.to_cpu(tensor, false);
    saved.emplace_back(tensor, cpu);
    // One version counter: the CPU's graph notices when somebody writes to what it saved.
    if (!tensor.is_inference()) {
      cpu.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
    }
    if (at::GradMode::is_enabled() && tensor.requires_grad()) {
      cpu.set_requires_grad(true);
      differentiable.push_back(tensor);
      cpu_inputs.push_back(cpu);
    }
    return cpu;
  }
};

void run_on_cpu_graph(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const OperatorInfo& info = operator_info(op);
  const int device = common_device(op, info, *stack);
  const Stream stream = current_stream(device);
  Forward forward(device);
  for (std::size_t i = stack->size() - info.arguments.size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = forward.to_cpu(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> converted;
      for (const c10::IValue& element : value.toListRef()) {
        converted.push_back(forward.to_cpu(element.toTensor()));
      }
      value = std::move(converted);
    }
  }
  check_not_forked();
  runtime().begin_kernel(stream, view(forward.accesses));
  {
    const AllocationScope on_device(device);
    const AutocastOnCpu autocast;
    const BorrowedDefaultGenerator dropout_draws(device);
    op.callBoxed(stack);
  }
  decltype(make_node<CpuGraphBackward>()) node;
  if (!forward.differentiable.empty()) {
    node = make_node<CpuGraphBackward>();
    node->device = device;
    node->set_next_edges(torch::autograd::collect_next_edges(forward.differentiable));
    node->cpu_inputs = forward.cpu_inputs;
    node->saved_inputs = std::move(forward.saved);
  }
  for (std::size_t i = stack->size() - info.returns; i < stack->size(); ++i) {
    const at::Tensor cpu = (*stack)[i].toTensor();
    at::Tensor ours = forward.operands.to_device_keeping_cpu(cpu);
    if (node != nullptr) {
      node->cpu_outputs.push_back(cpu);
      node->saved_outputs.emplace_back(ours, cpu);
      torch::autograd::set_history(ours, node);
    }
    (*stack)[i] = std::move(ours);
  }
  runtime().end_kernel(stream, {forward.operands.fresh().data(), forward.operands.fresh().size()});
}

constexpr std::array<const char*, 12> kOperators = {
    "aten::lstm.input",    "aten::lstm.data",      "aten::lstm_cell",      "aten::gru.input",
    "aten::gru.data",      "aten::gru_cell",       "aten::rnn_tanh.input", "aten::rnn_tanh.data",
    "aten::rnn_tanh_cell", "aten::rnn_relu.input", "aten::rnn_relu.data",  "aten::rnn_relu_cell"};

} // namespace

void register_recurrent(torch::Library& autograd, torch::Library& aten) {
  for (const char* name : kOperators) {
    autograd.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_graph>());
    // Inference mode skips the autograd key.
    aten.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu_graph>());
  }
}

} // namespace torch_uvm::emulated
