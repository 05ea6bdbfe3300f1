#include "tensor/storage/advice_registry.h"

#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/storage/ranges.h"

namespace torch_uvm {

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

AdviceRegistry& AdviceRegistry::get() {
  static auto* book = new AdviceRegistry(); // leaked: tensors are freed after static destructors have run
  return *book;
}

void AdviceRegistry::set(Block* block, Statement statement) {
  std::lock_guard lock(mutex_);
  entry(block).advised.insert(statement);
}

void AdviceRegistry::unset(Block* block, Statement statement) {
  std::lock_guard lock(mutex_);
  if (const auto found = entries_.find(block); found != entries_.end()) {
    found->second.advised.erase(statement);
  }
}

std::set<Statement> AdviceRegistry::statements(Block* block) const {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(block);
  return found == entries_.end() ? std::set<Statement>() : found->second.advised;
}

void AdviceRegistry::note_prefetch(Block* block) {
  std::lock_guard lock(mutex_);
  entry(block).prefetched = true;
}

bool AdviceRegistry::has_prefetch(Block* block) const {
  if (empty()) {
    return false;
  }
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(block);
  return found != entries_.end() && found->second.prefetched;
}

AdviceRegistry::Entry AdviceRegistry::take(Block* block) {
  std::lock_guard lock(mutex_);
  auto node = entries_.extract(block);
  if (node.empty()) {
    return {};
  }
  count_.fetch_sub(1, std::memory_order_relaxed);
  return std::move(node.mapped());
}

AdviceRegistry::Entry& AdviceRegistry::entry(Block* block) {
  const auto [found, added] = entries_.try_emplace(block);
  if (added) {
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  return found->second;
}

void note_prefetch(Block* block) {
  AdviceRegistry::get().note_prefetch(block);
}

bool has_prefetch(Block* block) {
  return AdviceRegistry::get().has_prefetch(block);
}

bool has_advice(Block* block) {
  return !AdviceRegistry::get().empty() && !AdviceRegistry::get().statements(block).empty();
}

void forget_hints(Block* block) noexcept {
  if (AdviceRegistry::get().empty() || Context::get().forked()) {
    return;
  }
  try {
    const AdviceRegistry::Entry entry = AdviceRegistry::get().take(block);
    const CachingManagedAllocator& allocator = Context::get().managed_allocator();
    const auto begin = reinterpret_cast<std::uintptr_t>(allocator.data(block));
    const Range pages = rounded_outwards({begin, begin + allocator.bytes(block)}, Machine::get().page_bytes);
    for (const auto& [advice, location] : entry.advised) {
      Context::get().runtime().advise(pages.data(), pages.bytes(), undoing(advice), location);
    }
  } catch (...) {
    // Advice that stays on the pages can only cost speed.
  }
}

} // namespace torch_uvm
