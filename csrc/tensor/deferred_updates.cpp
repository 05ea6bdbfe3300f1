#include "tensor/deferred_updates.h"

#include <ATen/core/List.h>
#include <ATen/core/function_schema.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>

#include "tensor/context.h"
#include "tensor/switch.h"

namespace torch_uvm {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// Makes a stream current; afterwards the one that was current before waits for what was queued meanwhile.
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
      void* event = nullptr;
      guard_.record(&event, stream_, stream_.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
      guard_.block(event, before_);
      guard_.destroyEvent(event, stream_.device_index());
    }
  }

 private:
  c10::impl::VirtualGuardImpl guard_;
  c10::Stream stream_;
  c10::Stream before_;
};

/// Optimizers' kernels write to gradients only to scale them, and the schema does not say so.
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
  // A tensor of its own: the caller's may be given another storage, and has a Python object.
  at::Tensor kept = tensor.variable_data();
  const c10::StorageImpl* const storage = kept.storage().unsafeGetStorageImpl();
  const auto known = std::ranges::find(accesses_, storage, &Access::storage);
  if (known == accesses_.end()) {
    accesses_.push_back({storage, writes});
  } else {
    known->writes |= writes;
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
    c10::List<at::Tensor> list = value.toTensorList().copy(); // the call's own is for its next try
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
  // As below the step's own no_grad, whatever the thread that looks is in the midst of.
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

// --- those that are pending

namespace {

struct Pending {
  std::unique_ptr<DeferredUpdate> update;
  std::uint64_t number = 0;
  bool running = false;
  bool done = false;
  bool failed = false; ///< its tensors refuse their use
};
using Shared = std::shared_ptr<Pending>;

struct Table {
  std::mutex mutex;
  std::condition_variable finished;
  std::unordered_map<const c10::StorageImpl*, std::vector<Shared>> by_storage;
  std::uint64_t numbered = 0;
  std::atomic<std::size_t> count{0};

  static Table& get() {
    static auto* table = new Table(); // leaked: what is pending when the process ends nobody looks at
    return *table;
  }
};

thread_local bool running = false;

std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "for reasons it did not tell";
  }
}

/// Has whoever takes the address of a storage told why not, as a kernel does.
void refuse_use(const Pending& pending, const std::exception_ptr& error) noexcept {
  for (const DeferredUpdate::Access& access : pending.update->accesses()) {
    if (access.writes) {
      const_cast<c10::StorageImpl*>(access.storage)
          ->release_data_and_set_meta_custom_data_ptr_error_msg_(
              "an update that an optimizer's step had deferred failed: " + what(error));
    }
  }
}

/// Before torch 2.13 there is no way back.
template <typename Storage>
void accept_use(Storage* storage) {
  if constexpr (requires { storage->clear_data_ptr_access_error_msg_(); }) {
    storage->clear_data_ptr_access_error_msg_();
  }
}

void accept_use(const Pending& pending) {
  for (const DeferredUpdate::Access& access : pending.update->accesses()) {
    if (access.writes) {
      accept_use(const_cast<c10::StorageImpl*>(access.storage));
    }
  }
}

void forget(Table& table, const Shared& pending) {
  for (const DeferredUpdate::Access& access : pending->update->accesses()) {
    const auto found = table.by_storage.find(access.storage);
    std::erase(found->second, pending);
    if (found->second.empty()) {
      table.by_storage.erase(found);
    }
  }
}

/// Runs it, or waits for the thread that does. \throws what it throws
void run(const Shared& pending) {
  Table& table = Table::get();
  {
    std::unique_lock lock(table.mutex);
    table.finished.wait(lock, [&] { return !pending->running; });
    if (pending->done) {
      return;
    }
    pending->running = true;
  }
  std::exception_ptr error;
  running = true;
  if (std::exchange(pending->failed, false)) {
    accept_use(*pending);
  }
  try {
    pending->update->run();
  } catch (...) {
    error = std::current_exception();
    pending->failed = true;
    refuse_use(*pending, error);
  }
  running = false;
  std::unique_ptr<DeferredUpdate> done; // goes without the mutex, and when nobody waits any more: it may be the last
                                        // to hold a storage with a Python object
  {
    const std::lock_guard lock(table.mutex);
    pending->running = false;
    if (!error) {
      pending->done = true;
      forget(table, pending);
      done = std::move(pending->update);
      table.count.fetch_sub(1, std::memory_order_relaxed);
    }
  }
  table.finished.notify_all();
  if (error) {
    std::rethrow_exception(error);
  }
}

/// In order; all are tried. \throws the first error
void run(std::vector<Shared>& found) {
  std::ranges::sort(found, {}, [](const Shared& pending) { return pending->number; });
  found.erase(std::ranges::unique(found).begin(), found.end());
  std::exception_ptr error;
  for (const Shared& pending : found) {
    try {
      run(pending);
    } catch (...) {
      error = error ? error : std::current_exception();
    }
  }
  if (error) {
    std::rethrow_exception(error);
  }
}

/// With the mutex held.
void collect(const Table& table, const c10::StorageImpl* storage, bool writes, std::vector<Shared>& found) {
  const auto known = table.by_storage.find(storage);
  if (known == table.by_storage.end()) {
    return;
  }
  for (const Shared& pending : known->second) {
    const std::vector<DeferredUpdate::Access>& accesses = pending->update->accesses();
    if (writes || std::ranges::find(accesses, storage, &DeferredUpdate::Access::storage)->writes) {
      found.push_back(pending);
    }
  }
}

void collect_all(const Table& table, std::vector<Shared>& found) {
  for (const auto& [storage, pending] : table.by_storage) {
    found.insert(found.end(), pending.begin(), pending.end());
  }
}

void collect(const Table& table, const at::Tensor& tensor, bool writes, std::vector<Shared>& found) {
  if (!tensor.defined()) {
    return;
  }
  if (tensor.has_storage()) {
    collect(table, tensor.storage().unsafeGetStorageImpl(), writes, found);
  } else {
    collect_all(table, found); // functorch's wrapper of nobody knows what: within it no operator is seen
  }
}

void collect(const Table& table, const c10::IValue& value, bool writes, std::vector<Shared>& found) {
  if (value.isTensor()) {
    collect(table, value.toTensor(), writes, found);
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      if (!element.isTensor() && !element.isNone() && !element.isList()) {
        return; // a list of numbers
      }
      collect(table, element, writes, found);
    }
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      collect(table, element, writes, found);
    }
  }
}

} // namespace

bool has_deferred_updates() noexcept {
  return Table::get().count.load(std::memory_order_relaxed) != 0;
}

std::size_t deferred_updates() {
  return Table::get().count.load(std::memory_order_relaxed);
}

bool runs_deferred_update() noexcept {
  return running;
}

void defer(std::vector<std::unique_ptr<DeferredUpdate>> updates) {
  Table& table = Table::get();
  const std::lock_guard lock(table.mutex);
  for (std::unique_ptr<DeferredUpdate>& update : updates) {
    const auto pending = std::make_shared<Pending>();
    pending->update = std::move(update);
    pending->number = ++table.numbered;
    for (const DeferredUpdate::Access& access : pending->update->accesses()) {
      table.by_storage[access.storage].push_back(pending);
    }
    table.count.fetch_add(1, std::memory_order_relaxed);
  }
}

void run_deferred_updates_before(c10::ArrayRef<c10::IValue> inputs,
                                 c10::function_ref<bool(std::size_t)> writes) noexcept {
  if (running) {
    return; // their own operators
  }
  try {
    std::vector<Shared> found;
    {
      Table& table = Table::get();
      const std::lock_guard lock(table.mutex);
      for (std::size_t index = 0; index < inputs.size(); ++index) {
        collect(table, inputs[index], writes(index), found);
      }
    }
    run(found);
  } catch (...) {
    // The tensors say so when the operator comes to use them.
  }
}

void run_deferred_updates_of(const c10::StorageImpl* storage) {
  if (!has_deferred_updates() || running || Context::get().forked()) {
    return;
  }
  std::vector<Shared> found;
  {
    Table& table = Table::get();
    const std::lock_guard lock(table.mutex);
    collect(table, storage, /*writes=*/true, found);
  }
  run(found);
}

void run_deferred_updates_of(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.has_storage()) {
    run_deferred_updates_of(tensor.storage().unsafeGetStorageImpl());
  }
}

void run_deferred_updates() {
  if (!has_deferred_updates() || running || Context::get().forked()) {
    return;
  }
  std::vector<Shared> found;
  {
    Table& table = Table::get();
    const std::lock_guard lock(table.mutex);
    collect_all(table, found);
  }
  run(found);
}

} // namespace torch_uvm
