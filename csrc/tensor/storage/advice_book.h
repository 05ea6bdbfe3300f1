// Which block carries which advice, and which was prefetched.
//
// Advice is the runtime's note on pages, and pages pass to other tensors when a block is freed. So what was
// set is remembered by block, and undone before the block goes back. A page that two blocks share, because
// they were advised together, loses its advice when the first of them goes.
//
// The book's mutex is a leaf: no runtime, no allocator is called with it held.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "tensor/storage/ranges.h"

namespace torch_uvm {

/// One thing that can be said of a page: the advice that sets it, and the location it speaks of.
using Statement = std::pair<Advice, Location>;

/// The advice that takes it back.
Advice undoing(Advice set);

class AdviceBook {
 public:
  static AdviceBook& get();

  /// What was said of pages of a block, and what is taken back.
  void set(Block* block, Statement statement, const Ranges& pages);
  void unset(Block* block, Statement statement, const Ranges& pages);
  std::vector<Statement> statements(Block* block) const;

  void note_prefetch(Block* block);
  bool has_prefetch(Block* block) const;

  /// Who frees a block has it: nobody else writes to its entry, and its own writes come before.
  bool empty() const {
    return count_.load(std::memory_order_relaxed) == 0;
  }

  struct Entry {
    std::map<Statement, Ranges> advised; ///< pages; those that the block shares with another included
    bool prefetched = false;
  };
  /// Forgets a block. \return what there was
  Entry take(Block* block);

 private:
  Entry& entry(Block* block);

  mutable std::mutex mutex_; // leaf
  std::unordered_map<Block*, Entry> entries_;
  std::atomic<std::size_t> count_{0}; ///< of entries
};

/// Remembers that part of a block was prefetched elsewhere than its home, until the block is freed.
void note_prefetch(Block* block);
bool has_prefetch(Block* block);

/// Whether any page of a block has advice that has not been taken back.
bool has_advice(Block* block);

/// Undoes all advice on a block that is about to be freed. One relaxed load where no block has any. In a
/// forked child nothing is undone: the pages are the parent's.
void forget_hints(Block* block) noexcept;

} // namespace torch_uvm
