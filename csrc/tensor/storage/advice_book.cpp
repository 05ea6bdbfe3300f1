#include "tensor/storage/advice_book.h"

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

AdviceBook& AdviceBook::get() {
  static auto* book = new AdviceBook(); // leaked: tensors are freed after static destructors have run
  return *book;
}

void AdviceBook::set(Block* block, Statement statement, const Ranges& pages) {
  std::lock_guard lock(mutex_);
  unite(entry(block).advised[statement], pages);
}

void AdviceBook::unset(Block* block, Statement statement, const Ranges& pages) {
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

std::vector<Statement> AdviceBook::statements(Block* block) const {
  std::lock_guard lock(mutex_);
  std::vector<Statement> made;
  if (const auto found = entries_.find(block); found != entries_.end()) {
    for (const auto& [statement, pages] : found->second.advised) {
      made.push_back(statement);
    }
  }
  return made;
}

void AdviceBook::note_prefetch(Block* block) {
  std::lock_guard lock(mutex_);
  entry(block).prefetched = true;
}

bool AdviceBook::has_prefetch(Block* block) const {
  if (empty()) {
    return false;
  }
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(block);
  return found != entries_.end() && found->second.prefetched;
}

AdviceBook::Entry AdviceBook::take(Block* block) {
  std::lock_guard lock(mutex_);
  auto node = entries_.extract(block);
  if (node.empty()) {
    return {};
  }
  count_.fetch_sub(1, std::memory_order_relaxed);
  return std::move(node.mapped());
}

AdviceBook::Entry& AdviceBook::entry(Block* block) {
  const auto [found, added] = entries_.try_emplace(block);
  if (added) {
    count_.fetch_add(1, std::memory_order_relaxed);
  }
  return found->second;
}

void note_prefetch(Block* block) {
  AdviceBook::get().note_prefetch(block);
}

bool has_prefetch(Block* block) {
  return AdviceBook::get().has_prefetch(block);
}

bool has_advice(Block* block) {
  return !AdviceBook::get().empty() && !AdviceBook::get().statements(block).empty();
}

void forget_hints(Block* block) noexcept {
  if (AdviceBook::get().empty() || Context::get().forked()) {
    return;
  }
  try {
    // A named variable: a range-for over a temporary's member would dangle.
    const AdviceBook::Entry entry = AdviceBook::get().take(block);
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
