#include "tensor/storage/user_allocators.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "allocator/adaptors/caching_allocator.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/advice_registry.h"
#include "tensor/storage/block_storage.h"

namespace torch_uvm {
namespace {

struct Remembered {
  std::mutex mutex; // leaf: nothing is called with it held
  std::vector<std::weak_ptr<Allocator>> allocators;

  static Remembered& get() {
    static auto* all = new Remembered(); // leaked: memory may run out during process exit
    return *all;
  }
};

class ProcessAllocator final : public CachingAllocator {
 public:
  ProcessAllocator() : CachingAllocator(Context::get().managed_allocator()) {}

  Allocation allocate(std::size_t bytes, Location home, Stream stream) override {
    if (Context::get().forked()) {
      throw RuntimeFailure(
          "managed memory in a forked process: its devices belong to the parent; start workers with 'spawn' or "
          "'forkserver'");
    }
    if (!home.is_host()) {
      start_budget(home.index);
    }
    const Allocation allocation = with_idle_memory([&] { return CachingAllocator::allocate(bytes, home, stream); });
    if (!home.is_host()) {
      note_allocation(home.index, bytes);
    }
    return allocation;
  }
  void free(const Allocation& allocation) noexcept override {
    forget_hints(static_cast<Block*>(allocation.handle));
    CachingAllocator::free(allocation);
  }
};

} // namespace

std::shared_ptr<Allocator> process_allocator() {
  static auto* allocator = new std::shared_ptr<Allocator>(std::make_shared<ProcessAllocator>());
  return *allocator;
}

std::shared_ptr<Allocator> remember(std::shared_ptr<Allocator> allocator) {
  Remembered& all = Remembered::get();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.allocators, [](const std::weak_ptr<Allocator>& each) { return each.expired(); });
  all.allocators.push_back(allocator);
  return allocator;
}

std::size_t release_idle_memory() {
  std::vector<std::shared_ptr<Allocator>> live;
  {
    Remembered& all = Remembered::get();
    const std::lock_guard lock(all.mutex);
    for (const std::weak_ptr<Allocator>& each : all.allocators) {
      if (std::shared_ptr<Allocator> allocator = each.lock()) {
        live.push_back(std::move(allocator));
      }
    }
  }
  std::size_t bytes = 0;
  for (auto each = live.rbegin(); each != live.rend(); ++each) { // newest first: an upstream is older than its users
    bytes += (*each)->release();
  }
  return bytes;
}

// --- storages ---------------------------------------------------------------------------------------------------

namespace {

struct Given {
  std::shared_ptr<Allocator> allocator;
  Allocation allocation;
  Location home;
  std::vector<Stream> streams; ///< the allocation's stream first, then the recorded ones
};

/// Allocations by address.
struct Registry {
  std::mutex mutex; // leaf: nothing is called with it held. It guards all `Given::streams`, too
  std::unordered_map<void*, Given*> given;

  static Registry& get() {
    static auto* all = new Registry(); // leaked: storages are freed after static destructors have run
    return *all;
  }
};

void delete_given(void* context) {
  if (Context::get().forked()) {
    return; // the memory belongs to the parent
  }
  const std::unique_ptr<Given> given(static_cast<Given*>(context));
  {
    const std::lock_guard lock(Registry::get().mutex);
    Registry::get().given.erase(given->allocation.ptr); // before the free: afterwards the address may be reused
  }
  given->allocator->free(given->allocation);
  report_to_profiler(Context::get().managed_allocator(), given->allocation.ptr,
                     -static_cast<std::int64_t>(given->allocation.bytes), given->home);
}

Given& given_of(const c10::DataPtr& data) {
  return *static_cast<Given*>(data.get_context());
}

} // namespace

c10::DataPtr allocate_from(const std::shared_ptr<Allocator>& allocator, std::size_t bytes, Location home, Stream stream,
                           c10::Device device) {
  Allocation allocation;
  try {
    allocation = allocator->allocate(bytes, home, stream);
  } catch (const OutOfMemory& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, error.what());
  } catch (const InvalidArgument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
  if (!allocation) {
    return {nullptr, device};
  }
  std::unique_ptr<Given> given;
  try {
    given = std::make_unique<Given>(Given{allocator, allocation, home, {stream}});
    const std::lock_guard lock(Registry::get().mutex);
    Registry::get().given.emplace(allocation.ptr, given.get());
  } catch (...) {
    allocator->free(allocation);
    throw;
  }
  c10::DataPtr data(allocation.ptr, given.release(), &delete_given, device);
  report_to_profiler(Context::get().managed_allocator(), allocation.ptr, static_cast<std::int64_t>(bytes), home);
  return data;
}

bool is_from_allocator(const c10::DataPtr& data) {
  return data.get_deleter() == &delete_given;
}

c10::DataPtr allocator_data_at(void* ptr, c10::Device device) {
  Registry& registry = Registry::get();
  const std::lock_guard lock(registry.mutex);
  const auto found = registry.given.find(ptr);
  return found == registry.given.end() ? c10::DataPtr() : c10::DataPtr(ptr, found->second, &delete_given, device);
}

void record_allocator_stream(const c10::DataPtr& data, Stream stream) {
  Given& given = given_of(data);
  {
    const std::lock_guard lock(Registry::get().mutex);
    if (std::ranges::find(given.streams, stream) == given.streams.end()) {
      given.streams.push_back(stream);
    }
  }
  given.allocator->record_stream(given.allocation, stream);
}

std::vector<Stream> allocator_streams(const c10::DataPtr& data) {
  const std::lock_guard lock(Registry::get().mutex);
  std::vector<Stream> streams = given_of(data).streams;
  std::erase_if(streams, [](Stream stream) { return stream.is_host(); });
  return streams;
}

} // namespace torch_uvm
