#include "tensor/storage/idle_allocators.h"

#include <mutex>
#include <vector>

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

} // namespace

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
