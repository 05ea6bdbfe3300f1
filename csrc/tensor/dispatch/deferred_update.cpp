#include <ATen/core/List.h>
#include <ATen/core/function_schema.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <new>
#include <optional>
#include <string>
#include <utility>

#include "tensor/dispatch/deferred_updates.h"
#include "tensor/process/switch.h"

namespace torch_uvm {
namespace {

std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

#if __has_include(<c10/core/StorageMaterializer.h>) // from torch 2.13 on

void allow_address(c10::StorageImpl* storage) {
  storage->clear_data_ptr_access_error_msg_();
}

#else // PyTorch can set these flags, and cannot clear them

struct Refuses {};
struct Checks {};
bool c10::StorageImpl::* flag_of(Refuses);
bool c10::StorageImpl::* flag_of(Checks);

/// Names private members: access is not checked in an explicit instantiation.
template <typename Tag, bool c10::StorageImpl::* Flag>
struct Opened {
  friend bool c10::StorageImpl::* flag_of(Tag) {
    return Flag;
  }
};
template struct Opened<Refuses, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
template struct Opened<Checks, &c10::StorageImpl::has_mutable_data_ptr_check_>;

void allow_address(c10::StorageImpl* storage) {
  storage->*flag_of(Refuses()) = false;
  storage->*flag_of(Checks()) = false;
}

#endif

} // namespace

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void wait_for(c10::Stream earlier, c10::Stream later) {
  const c10::impl::VirtualGuardImpl guard(earlier.device_type());
  void* event = nullptr;
  try {
    guard.record(&event, earlier, earlier.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
    guard.block(event, later);
  } catch (...) {
    guard.destroyEvent(event, earlier.device_index());
    throw;
  }
  guard.destroyEvent(event, earlier.device_index());
}

namespace {

/// RAII: makes a stream current. `join` makes the previously current stream wait for the work queued on it.
class OnStream {
 public:
  explicit OnStream(c10::Stream stream) : guard_(stream.device_type()), stream_(stream), before_(stream) {
    before_ = guard_.getStream(stream.device());
    if (before_ != stream_) {
      guard_.exchangeStream(stream_);
    }
  }
  ~OnStream() {
    if (before_ != stream_) {
      guard_.exchangeStream(before_);
    }
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

  void join() const {
    if (before_ != stream_) {
      wait_for(stream_, before_);
    }
  }

 private:
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
  c10::Stream before_;
};

/// Fused optimizer schemas declare `grads` mutable, but the kernels write gradients only if `grad_scale` is given.
bool only_reads(const c10::FunctionSchema& schema, std::size_t argument, const torch::jit::Stack& inputs) {
  if (!std::string_view(schema.name()).starts_with("aten::_fused_") || schema.arguments()[argument].name() != "grads") {
    return false;
  }
  const std::optional<int> scale = schema.argumentIndexWithName("grad_scale");
  return scale && inputs[static_cast<std::size_t>(*scale)].isNone();
}

} // namespace

DeferredUpdate::DeferredUpdate(c10::Device device) : stream_(current_stream(device)), managed_(managed_enabled()) {}

at::Tensor DeferredUpdate::keep(const at::Tensor& tensor, bool writes, Patch where, Call& call) {
  if (!tensor.defined()) {
    return tensor;
  }
  if (const auto found = result_of_.find(tensor.unsafeGetTensorImpl()); found != result_of_.end()) {
    where.result = found->second;
    call.patches.push_back(where);
    last_use_[where.result] = calls_.size();
    return {};
  }
  // A new TensorImpl on the same storage: the caller may give its tensor another storage, and that tensor has a Python
  // object.
  at::Tensor kept = tensor.variable_data();
  accesses_[kept.storage().unsafeGetStorageImpl()] |= writes;
  if (writes) {
    kept.storage().unsafeGetStorageImpl()->get_extra_meta(); // allocated now, so that `refuse_use` need not
  }
  return kept;
}

void DeferredUpdate::add(const c10::OperatorHandle& op, torch::jit::Stack inputs,
                         const std::vector<at::Tensor>& results) {
  const c10::FunctionSchema& schema = op.schema();
  Call call{op, std::move(inputs), {}, results.size()};
  for (std::size_t index = 0; index < call.inputs.size(); ++index) {
    c10::IValue& value = call.inputs[index];
    const c10::AliasInfo* const alias = schema.arguments()[index].alias_info();
    const bool writes = alias != nullptr && alias->isWrite() && !only_reads(schema, index, call.inputs);
    if (value.isTensor()) {
      value = keep(value.toTensor(), writes, {index, 0, 0}, call);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> kept;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        kept.push_back(keep(tensor, writes, {index, kept.size(), 0}, call));
      }
      value = std::move(kept);
    } else {
      TORCH_CHECK(!value.isList() || value.toListRef().empty() || !value.toListRef().front().isTensor(),
                  "a deferred update cannot have ", schema.operator_name(), ": its argument ", index,
                  " is a list of optional tensors");
    }
  }
  for (const at::Tensor& result : results) {
    result_of_.emplace(result.unsafeGetTensorImpl(), last_use_.size());
    last_use_.push_back(calls_.size());
    stand_ins_.push_back(result);
  }
  calls_.push_back(std::move(call));
}

void DeferredUpdate::seal() {
  result_of_.clear();
  stand_ins_.clear();
}

void DeferredUpdate::make(const Call& call) {
  torch::jit::Stack stack = call.inputs;
  for (const Patch& patch : call.patches) {
    c10::IValue& value = stack[patch.argument];
    if (!value.isTensorList()) {
      value = results_[patch.result];
      continue;
    }
    c10::List<at::Tensor> list = value.toTensorList().copy(); // keep the original: the call may be retried
    list.set(patch.element, results_[patch.result]);
    value = std::move(list);
  }
  call.op.callBoxed(stack);
  if (call.results == 0) {
    return;
  }
  for (const c10::IValue& value : stack) {
    if (value.isTensor()) {
      results_.push_back(value.toTensor());
    } else {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        results_.push_back(tensor);
      }
    }
  }
}

void DeferredUpdate::run() {
  // Restore the dispatch state of the step (no_grad, below autograd and autocast): the thread that triggers the update
  // may be in any other.
  const c10::AutoGradMode no_grad(false);
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset);
  std::optional<ManagedScope> as_then;
  if (managed_enabled() != managed_) {
    as_then.emplace(managed_);
  }
  const OnStream on_stream(stream_);
  while (next_ < calls_.size()) {
    make(calls_[next_]);
    for (std::size_t result = 0; result < results_.size(); ++result) {
      if (last_use_[result] == next_) {
        results_[result].reset();
      }
    }
    ++next_;
  }
  on_stream.join();
}

void DeferredUpdate::refuse_use(std::string_view message, const std::exception_ptr& error) const noexcept {
  for (const auto& [storage, writes] : accesses_) {
    if (!writes) {
      continue;
    }
    std::optional<std::string> text;
    try {
      text = std::string(message) + (error ? what(error) : "");
    } catch (const std::bad_alloc&) { // access raises PyTorch's own message
    }
    const_cast<c10::StorageImpl*>(storage)->release_data_and_set_meta_custom_data_ptr_error_msg_(
        std::move(text)); // allocates nothing: see `keep`
  }
}

void DeferredUpdate::accept_use() const noexcept {
  for (const auto& [storage, writes] : accesses_) {
    if (writes) {
      allow_address(const_cast<c10::StorageImpl*>(storage));
    }
  }
}

} // namespace torch_uvm
