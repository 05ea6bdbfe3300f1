#include "tensor/storage/advice_registry.h"

#include "tensor/process/context.h"

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

void AdviceRegistry::set(Block* block, Statement statement, const Ranges& pages) {
  std::lock_guard lock(mutex_);
  unite(entry(block).advised[statement], pages);
}

void AdviceRegistry::unset(Block* block, Statement statement, const Ranges& pages) {
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(block);
  if (found == entries_.end()) {
    return;
  }
  const auto advised = found->second.advised.find(statement);
  if (advised == found->second.advised.end()) {
    return;
  }
  advised->second = difference(advised->second, pages);
  if (advised->second.empty()) {
    found->second.advised.erase(advised);
  }
  if (found->second.advised.empty() && !found->second.prefetched) {
    entries_.erase(found);
    count_.fetch_sub(1, std::memory_order_relaxed);
  }
}

std::vector<Statement> AdviceRegistry::statements(Block* block) const {
  std::lock_guard lock(mutex_);
  std::vector<Statement> made;
  if (const auto found = entries_.find(block); found != entries_.end()) {
    for (const auto& [statement, pages] : found->second.advised) {
      made.push_back(statement);
    }
  }
  return made;
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
    // A named variable: a range-for over a temporary's member would dangle.
    const AdviceRegistry::Entry entry = AdviceRegistry::get().take(block);
    for (const auto& [statement, pages] : entry.advised) {
      for (const Range& range : pages) {
        Context::get().runtime().advise(range.data(), range.bytes(), undoing(statement.first), statement.second);
      }
    }
  } catch (...) {
    // Advice that stays on the pages can only cost speed.
  }
}

} // namespace torch_uvm
