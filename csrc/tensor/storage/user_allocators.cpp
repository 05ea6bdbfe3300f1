#include "tensor/storage/user_allocators.h"

#include <mutex>
#include <vector>

#include "allocator/adaptors/caching_allocator.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/advice_registry.h"

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

} // namespace torch_uvm
