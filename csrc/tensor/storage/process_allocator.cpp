#include "tensor/storage/process_allocator.h"

#include "allocator/adaptors/caching_allocator.h"
#include "runtime/error.h"
#include "tensor/process/budgets.h"
#include "tensor/process/context.h"
#include "tensor/process/process_engine.h"
#include "tensor/storage/advice_registry.h"
#include "tensor/storage/idle_allocators.h"

namespace torch_uvm {
namespace {

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

} // namespace torch_uvm
