#include "tensor/storage/managed_storage.h"

#include <ATen/FunctionalTensorWrapper.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <memory>
#include <utility>

#include "allocator/size_classes.h"
#include "residency/engine/relocation_min.h"
#include "residency/trace/allocation_sites.h"
#include "runtime/bytes.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"
#include "tensor/process/switch.h"
#include "tensor/storage/adopted_storage.h"
#include "tensor/storage/block_storage.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/user_allocators.h"

namespace torch_uvm {
namespace {

/// Appended to out-of-memory errors of plain memory. For CUDA's, torch_uvm/_patches/oom_hint.py adds the same text.
constexpr const char* kPlainHint =
    "\nManaged memory is off. With it, a script may use more than the device has: python -m torch_uvm run SCRIPT";

/// Appended if the memory could not be pinned on the host instead.
constexpr const char* kNoHost = "\nThe device has no room, nor has the host for memory to be used in its place.";

/// Where a device with a budget has no room: in pinned memory, until the residency engine brings it to the device.
/// \return empty if it cannot be there
c10::DataPtr allocate_on_host(std::size_t bytes, Location home, Stream stream, c10::Device device) {
  Engine* const engine = home.is_host() ? nullptr : engine_in_use();
  const auto [record, ptr] = engine == nullptr ? std::pair<Record*, void*>() // no budget
                                               : engine->create_on_host(bytes, home.index, stream);
  return record == nullptr ? c10::DataPtr() : host_data(*record, ptr, device);
}

/// \param data_of makes the DataPtr of the block
/// \param hint appended to an out-of-memory error
c10::DataPtr allocate(CachingManagedAllocator& allocator, std::size_t bytes, Location home, Stream stream,
                      c10::Device device, c10::DataPtr (*data_of)(Block*, c10::Device), const char* hint = "") {
  Block* block = nullptr;
  try {
    block = with_idle_memory([&] { return allocator.allocate(bytes, home, stream); });
  } catch (const OutOfMemory& error) {
    if (&allocator == &Context::get().managed_allocator()) {
      if (c10::DataPtr data = allocate_on_host(bytes, home, stream, device)) {
        return data;
      }
      hint = home.is_host() || engine_in_use() == nullptr ? hint : kNoHost;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what(), hint);
  }
  c10::DataPtr data = data_of(block, device);
  if (block != nullptr && c10::memoryProfilingEnabled()) {
    report_to_profiler(allocator, data.get(), static_cast<std::int64_t>(allocator.bytes(block)), home);
  }
  return data;
}

/// Zeroes new memory before the stream's own work on it. For the host at once: the allocator has waited for work that
/// may still touch the block.
void zero(void* ptr, std::size_t bytes, Stream stream) {
  if (ptr == nullptr) {
    return;
  }
  if (stream.is_host()) {
    std::memset(ptr, 0, bytes);
  } else {
    Context::get().runtime().zero_async(ptr, bytes, stream);
  }
}

void delete_host_tensor(void* ptr) {
  data_by_address(ptr, c10::Device(c10::DeviceType::CPU)); // the temporary DataPtr frees the block
}

} // namespace

c10::DataPtr allocate_managed(std::size_t bytes, Location home, Stream stream, c10::Device device) {
  Context& context = Context::get();
  if (context.forked()) {
    TORCH_CHECK(device.is_cpu(), "managed memory for ", device,
                " in a forked process: its devices belong to the parent; start workers with 'spawn' or 'forkserver'");
    return c10::GetDefaultCPUAllocator()->allocate(bytes);
  }
  if (!home.is_host()) {
    start_budget(home.index);
  }
  const std::shared_ptr<Allocator> chosen = current_allocator();
  // A zero-byte tensor has no block but keeps the managed deleter, so `is_managed` is true.
  const auto made = [&] {
    return chosen != nullptr && bytes != 0 && chosen->serves(home)
               ? allocate_from(chosen, bytes, home, stream, device)
               : allocate(context.managed_allocator(), bytes, home, stream, device, &managed_data);
  };
  c10::DataPtr data;
  try {
    data = made();
  } catch (const c10::OutOfMemoryError&) {
    if (!home.is_host() || !leave_limit_to_host(round_up(bytes, kLargeGranularity))) {
      throw;
    }
    data = made();
  }
  if (bytes >= relocation_min() && AllocationSites::get().asked() && is_own_block(data)) {
    AllocationSites::get().made(data.get_context(), bytes);
  }
  if (context.zeroes_allocations()) {
    zero(data.get(), bytes, stream);
  }
  if (!home.is_host()) {
    note_allocation(home.index, bytes);
  }
  return data;
}

c10::DataPtr allocate_plain(std::size_t bytes, Stream stream, c10::Device device) {
  TORCH_CHECK(!Context::get().forked(), "memory of ", device,
              " in a forked process: its devices belong to the parent; start workers with 'spawn' or 'forkserver'");
  const Location home = Location::device(device.index());
  c10::DataPtr data = with_fitted_budget(
      [&] { return home.index; }, bytes,
      [&] { return allocate(*plain_allocator(), bytes, home, stream, device, &plain_data, kPlainHint); });
  look_at_budget(home.index);
  return data;
}

c10::DeleterFnPtr host_tensor_deleter() {
  return &delete_host_tensor;
}

bool is_host_tensor(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_host_tensor;
}

bool is_managed(const c10::DataPtr& data) {
  // Read the deleter once: the engine may relocate the storage on another thread, which replaces one of our deleters
  // by another.
  const c10::DataPtr seen(nullptr, nullptr, data.get_deleter(), c10::Device(c10::DeviceType::CPU));
  return is_own_block(seen) || has_owner(seen) || is_host_tensor(seen) || is_on_host(seen) || is_from_allocator(seen) ||
         is_adopted(seen);
}

bool is_managed(const at::Tensor& tensor) {
  if (!tensor.defined() || at::functionalization::impl::isFunctionalTensor(tensor)) {
    return false;
  }
  if (const auto* batched = at::functorch::maybeGetBatchedImpl(tensor)) {
    return is_managed(batched->value());
  }
  if (tensor.key_set().has(c10::DispatchKey::FuncTorchGradWrapper)) {
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("torch_uvm::_is_managed", "").typed<bool(const at::Tensor&)>();
    return op.call(tensor); // the dispatcher unwraps the tensor
  }
  return tensor.layout() == c10::kStrided && !tensor.is_nested() && tensor.has_storage() &&
         is_managed(data_of(tensor.storage()));
}

std::size_t label_count(const c10::Storage& storage) {
  return labels_of(storage).value_or(is_managed(data_of(storage)) ? 1 : 0);
}

Block* block_of(const c10::DataPtr& data) {
  const c10::DataPtr& bytes = data_behind_labels(data);
  if (is_on_host(bytes)) {
    return nullptr;
  }
  if (is_host_tensor(bytes) || is_from_allocator(bytes)) {
    return Context::get().managed_allocator().find(bytes.get());
  }
  return is_own_block(bytes) || is_plain(bytes) ? static_cast<Block*>(bytes.get_context()) : nullptr;
}

c10::DataPtr data_by_address(void* ptr, c10::Device device) {
  if (ptr != nullptr && Context::get().in_use()) {
    if (c10::DataPtr data = allocator_data_at(ptr, device)) { // first: `find` below would return the allocator's block
      return data;
    }
    if (Block* block = Context::get().managed_allocator().find(ptr)) {
      return managed_data(block, device);
    }
    CachingManagedAllocator* plain = plain_allocator();
    if (Block* block = plain == nullptr ? nullptr : plain->find(ptr)) {
      return plain_data(block, device);
    }
    const Engine* const engine = engine_in_use();
    if (Record* record = engine == nullptr ? nullptr : engine->created_on_host_at(ptr)) {
      return host_data(*record, ptr, device);
    }
  }
  return {};
}

void record_stream(const c10::DataPtr& data, Stream stream) {
  const c10::DataPtr& bytes = data_behind_labels(data);
  if (is_from_allocator(bytes)) {
    record_allocator_stream(bytes, stream);
    return;
  }
  if (is_adopted(bytes)) {
    note_adopted_use(bytes, stream.device);
    return;
  }
  if (Block* const block = block_of(data)) {
    (is_managed(data) ? Context::get().managed_allocator() : *plain_allocator()).record_stream(block, stream);
  }
}

} // namespace torch_uvm
