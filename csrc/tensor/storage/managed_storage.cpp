#include "tensor/storage/managed_storage.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <exception>
#include <memory>

#include "residency/engine/relocation_min.h"
#include "residency/trace/origins.h"
#include "tensor/dispatch/watcher.h"
#include "tensor/hints/advice.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/switch.h"
#include "tensor/storage/allocator_storage.h"
#include "tensor/storage/host_tensors.h"
#include "tensor/storage/idle_allocators.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/profiler_report.h"

namespace torch_uvm {
namespace {

std::atomic<CachingManagedAllocator*> plain_allocator{nullptr};

void free(CachingManagedAllocator& allocator, Block* block) {
  if (!c10::memoryProfilingEnabled()) {
    allocator.free(block);
    return;
  }
  void* const ptr = allocator.data(block);
  const auto bytes = static_cast<std::int64_t>(allocator.bytes(block));
  const Location home = allocator.home(block);
  allocator.free(block);
  try {
    report_to_profiler(allocator, ptr, -bytes, home);
  } catch (const std::exception&) {
    // Nothing to be done about it where memory is freed.
  }
}

void delete_managed(void* block) {
  const bool known = forget_record(static_cast<Block*>(block));
  if (!known && Origins::get().asked() && !Context::get().forked()) {
    Origins::get().gone(block);
  }
  forget_hints(static_cast<Block*>(block));
  free(Context::get().managed_allocator(), static_cast<Block*>(block));
  if (known) {
    note_freed();
  }
}

void delete_plain(void* block) {
  free(*plain_allocator.load(), static_cast<Block*>(block));
}

/// What an error of plain memory says last; the Python package says the same of CUDA's (out_of_memory.py).
constexpr const char* kPlainHint =
    "\nManaged memory is off. With it, a script may use more than the device has: python -m torch_uvm run SCRIPT";

/// \param hint of an error, at its end
c10::DataPtr allocate(CachingManagedAllocator& allocator, std::size_t bytes, Location home, Stream stream,
                      c10::Device device, c10::DeleterFnPtr deleter, const char* hint = "") {
  Block* block = nullptr;
  try {
    block = with_idle_memory([&] { return allocator.allocate(bytes, home, stream); });
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what(), hint);
  }
  c10::DataPtr data(block == nullptr ? nullptr : allocator.data(block), block, deleter, device);
  if (block != nullptr && c10::memoryProfilingEnabled()) {
    report_to_profiler(allocator, data.get(), static_cast<std::int64_t>(allocator.bytes(block)), home);
  }
  return data;
}

/// Before the stream's own work on it; the host has waited already for those that may still touch it.
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
  // No bytes are nobody's: the storage is managed all the same, which its deleter says.
  c10::DataPtr data = chosen != nullptr && bytes != 0 && chosen->serves(home)
                          ? allocate_from(chosen, bytes, home, stream, device)
                          : allocate(context.managed_allocator(), bytes, home, stream, device, &delete_managed);
  if (bytes >= relocation_min() && Origins::get().asked() && is_own_block(data)) {
    Origins::get().made(data.get_context(), bytes);
  }
  if (context.zeroes_allocations()) {
    zero(data.get(), bytes, stream);
  }
  if (!home.is_host()) {
    note_allocation(home.index, bytes);
  }
  return data;
}

void set_plain_allocator(CachingManagedAllocator* allocator) {
  plain_allocator.store(allocator);
}

c10::DataPtr allocate_plain(std::size_t bytes, Stream stream, c10::Device device) {
  TORCH_CHECK(!Context::get().forked(), "memory of ", device,
              " in a forked process: its devices belong to the parent; start workers with 'spawn' or 'forkserver'");
  return allocate(*plain_allocator.load(), bytes, Location::device(device.index()), stream, device, &delete_plain,
                  kPlainHint);
}

bool is_managed(const c10::DataPtr& data) {
  // Read once: the engine may relocate the storage on another thread, which replaces one deleter of ours by another.
  const c10::DataPtr seen(nullptr, nullptr, data.get_deleter(), c10::Device(c10::DeviceType::CPU));
  return is_own_block(seen) || has_owner(seen) || is_host_tensor(seen) || is_on_host(seen) || is_from_allocator(seen);
}

bool is_own_block(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_managed;
}

bool is_plain(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_plain;
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

c10::DataPtr managed_data(Block* block, c10::Device device) {
  return {Context::get().managed_allocator().data(block), block, &delete_managed, device};
}

c10::DataPtr plain_data(Block* block, c10::Device device) {
  return {plain_allocator.load()->data(block), block, &delete_plain, device};
}

c10::DataPtr data_by_address(void* ptr, c10::Device device) {
  if (ptr != nullptr && Context::get().in_use()) {
    if (c10::DataPtr data = allocator_data_at(ptr, device)) { // first: its block is the allocator's
      return data;
    }
    if (Block* block = Context::get().managed_allocator().find(ptr)) {
      return managed_data(block, device);
    }
    CachingManagedAllocator* plain = plain_allocator.load();
    if (Block* block = plain == nullptr ? nullptr : plain->find(ptr)) {
      return plain_data(block, device);
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
  Block* block = block_of(data);
  if (block == nullptr) {
    return;
  }
  (is_managed(data) ? Context::get().managed_allocator() : *plain_allocator.load()).record_stream(block, stream);
}

} // namespace torch_uvm
