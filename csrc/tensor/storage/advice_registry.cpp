#include "tensor/storage/advice_registry.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "tensor/process/context.h"
#include "tensor/process/machine.h"

namespace torch_uvm {
namespace {

struct Entry {
  std::vector<Statement> advised;
  bool prefetched = false;
};

struct Registry {
  std::mutex mutex; // leaf: neither the runtime nor an allocator is called with it held
  std::unordered_map<Block*, Entry> entries;
  /// Whether there may be entries. A relaxed load is enough to free a block: only its owner writes to its entry, and
  /// those writes happen before the free.
  std::atomic<bool> used{false};

  static Registry& get() {
    static auto* registry = new Registry(); // leaked: tensors are freed after static destructors have run
    return *registry;
  }

  /// A copy of the block's entry.
  Entry find(Block* block) {
    if (!used.load(std::memory_order_relaxed)) {
      return {};
    }
    const std::lock_guard lock(mutex);
    const auto found = entries.find(block);
    return found == entries.end() ? Entry() : found->second;
  }

  template <class Change>
  void change(Block* block, Change change) {
    const std::lock_guard lock(mutex);
    Entry& entry = entries[block];
    change(entry);
    if (entry.advised.empty() && !entry.prefetched) {
      entries.erase(block);
    }
    used.store(!entries.empty(), std::memory_order_relaxed);
  }
};

} // namespace

Advice undoing(Advice set) {
  switch (set) {
    case Advice::kSetReadMostly:
      return Advice::kUnsetReadMostly;
    case Advice::kSetPreferredLocation:
      return Advice::kUnsetPreferredLocation;
    default:
      return Advice::kUnsetAccessedBy;
  }
}

void set_advice(Block* block, Statement statement) {
  Registry::get().change(block, [&](Entry& entry) {
    if (std::ranges::find(entry.advised, statement) == entry.advised.end()) {
      entry.advised.push_back(statement);
    }
  });
}

void unset_advice(Block* block, Statement statement) {
  Registry::get().change(block, [&](Entry& entry) { std::erase(entry.advised, statement); });
}

std::vector<Statement> advice_on(Block* block) {
  return Registry::get().find(block).advised;
}

bool has_advice(Block* block) {
  return !advice_on(block).empty();
}

void note_prefetch(Block* block) {
  Registry::get().change(block, [](Entry& entry) { entry.prefetched = true; });
}

bool has_prefetch(Block* block) {
  return Registry::get().find(block).prefetched;
}

Range range_of(Block* block) {
  const CachingManagedAllocator& allocator = Context::get().managed_allocator();
  const auto begin = reinterpret_cast<std::uintptr_t>(allocator.data(block));
  return {begin, begin + allocator.bytes(block)};
}

void forget_hints(Block* block) noexcept {
  Registry& registry = Registry::get();
  if (!registry.used.load(std::memory_order_relaxed) || Context::get().forked()) {
    return;
  }
  try {
    const Entry entry = registry.find(block);
    if (entry.advised.empty() && !entry.prefetched) {
      return;
    }
    registry.change(block, [](Entry& known) { known = {}; });
    const Range pages = rounded_outwards(range_of(block), Machine::get().page_bytes);
    for (const auto& [advice, location] : entry.advised) {
      Context::get().runtime().advise(pages.data(), pages.bytes(), undoing(advice), location);
    }
  } catch (...) {
    // Advice that stays on the pages can only cost speed.
  }
}

} // namespace torch_uvm
