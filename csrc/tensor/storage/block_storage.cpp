#include "tensor/storage/block_storage.h"

#include <atomic>
#include <exception>

#include "residency/trace/allocation_sites.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/advice_registry.h"

namespace torch_uvm {
namespace {

std::atomic<CachingManagedAllocator*> the_plain_allocator{nullptr};

void free(CachingManagedAllocator& allocator, Block* block) {
  if (!c10::memoryProfilingEnabled()) {
    allocator.free(block);
    return;
  }
  void* const ptr = allocator.data(block);
  const auto bytes = static_cast<std::int64_t>(allocator.bytes(block));
  const Location home = allocator.home(block);
  allocator.free(block);
  report_to_profiler(allocator, ptr, -bytes, home);
}

void delete_managed(void* block) {
  const bool known = forget_record(static_cast<Block*>(block));
  if (!known && AllocationSites::get().asked() && !Context::get().forked()) {
    AllocationSites::get().gone(block);
  }
  forget_hints(static_cast<Block*>(block));
  free(Context::get().managed_allocator(), static_cast<Block*>(block));
  if (known) {
    engine_in_use()->freed();
  }
}

void delete_plain(void* block) {
  free(*plain_allocator(), static_cast<Block*>(block));
}

void delete_evicted(void* record) {
  if (Engine* const engine = engine_in_use()) {
    engine->destroyed(static_cast<Record*>(record));
  }
}

} // namespace

void set_plain_allocator(CachingManagedAllocator* allocator) {
  the_plain_allocator.store(allocator);
}

CachingManagedAllocator* plain_allocator() {
  return the_plain_allocator.load();
}

c10::DataPtr managed_data(Block* block, c10::Device device) {
  return {block == nullptr ? nullptr : Context::get().managed_allocator().data(block), block, &delete_managed, device};
}

c10::DataPtr plain_data(Block* block, c10::Device device) {
  return {block == nullptr ? nullptr : plain_allocator()->data(block), block, &delete_plain, device};
}

c10::DataPtr host_data(Record& record, void* ptr, c10::Device device) {
  return {ptr, &record, &delete_evicted, device};
}

bool is_own_block(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_managed;
}

bool is_plain(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_plain;
}

bool is_on_host(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_evicted;
}

void report_to_profiler(const CachingManagedAllocator& memory, void* ptr, std::int64_t change, Location home) noexcept {
  if (!c10::memoryProfilingEnabled()) {
    return;
  }
  try {
    const Statistics now = memory.statistics(home);
    c10::reportMemoryUsageToProfiler(ptr, change, static_cast<std::size_t>(now.allocated_bytes[0].current),
                                     static_cast<std::size_t>(now.reserved_bytes[0].current), torch_device(home));
  } catch (const std::exception&) {
    // No allocation or free fails because profiling does.
  }
}

} // namespace torch_uvm
