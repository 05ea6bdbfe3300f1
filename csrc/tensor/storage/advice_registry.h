// Registry of the memory advice on each block, and of blocks that were prefetched.
//
// The runtime attaches advice to pages, and a freed block's pages are reused for other tensors. So advice is recorded
// by block, and undone before the block is freed. A page that two blocks share (because they were advised together)
// loses its advice when the first of them is freed.
//
// The registry's mutex is a leaf: neither the runtime nor an allocator is called with it held.
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

/// One piece of advice about a page: the advice that sets it, and its location argument.
using Statement = std::pair<Advice, Location>;

/// The advice that undoes a set advice.
Advice undoing(Advice set);

class AdviceRegistry {
 public:
  static AdviceRegistry& get();

  /// Records that pages of a block were given advice, or that the advice was undone.
  void set(Block* block, Statement statement, const Ranges& pages);
  void unset(Block* block, Statement statement, const Ranges& pages);
  std::vector<Statement> statements(Block* block) const;

  void note_prefetch(Block* block);
  bool has_prefetch(Block* block) const;

  /// Whether no block has an entry. A relaxed load is enough to free a block: only its owner writes to its entry, and
  /// those writes happen before the free.
  bool empty() const {
    return count_.load(std::memory_order_relaxed) == 0;
  }

  struct Entry {
    std::map<Statement, Ranges> advised; ///< pages, including those shared with another block
    bool prefetched = false;
  };
  /// Removes and returns a block's entry.
  Entry take(Block* block);

 private:
  Entry& entry(Block* block);

  mutable std::mutex mutex_; // leaf
  std::unordered_map<Block*, Entry> entries_;
  std::atomic<std::size_t> count_{0}; ///< number of entries
};

/// Records, until the block is freed, that part of it was prefetched away from its home.
void note_prefetch(Block* block);
bool has_prefetch(Block* block);

/// Whether any page of a block has advice that was not undone.
bool has_advice(Block* block);

/// Undoes all advice on a block that is about to be freed. One relaxed load if no block has advice. A no-op in a forked
/// child, where the pages belong to the parent.
void forget_hints(Block* block) noexcept;

} // namespace torch_uvm
