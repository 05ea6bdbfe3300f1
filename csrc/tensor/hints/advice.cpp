#include "tensor/hints/advice.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "runtime/error.h"
#include "tensor/hints/ranges.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/storage/allocator_storage.h"
#include "tensor/storage/labels.h"

namespace torch_uvm {
namespace {

/// One thing that can be said of a page: the advice that sets it, and the location it speaks of.
using Statement = std::pair<Advice, Location>;

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

struct Entry {
  std::map<Statement, Ranges> advised; ///< pages; those that the block shares with another included
  bool prefetched = false;
};

class Book {
 public:
  static Book& get() {
    static auto* book = new Book(); // leaked: tensors outlive every static destructor
    return *book;
  }

  void set(Block* block, Statement statement, const Ranges& pages) {
    std::lock_guard lock(mutex_);
    unite(entry(block).advised[statement], pages);
  }

  void unset(Block* block, Statement statement, const Ranges& pages) {
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

  std::vector<Statement> statements(Block* block) const {
    std::lock_guard lock(mutex_);
    std::vector<Statement> made;
    if (const auto found = entries_.find(block); found != entries_.end()) {
      for (const auto& [statement, pages] : found->second.advised) {
        made.push_back(statement);
      }
    }
    return made;
  }

  void note_prefetch(Block* block) {
    std::lock_guard lock(mutex_);
    entry(block).prefetched = true;
  }

  bool has_prefetch(Block* block) const {
    if (empty()) {
      return false;
    }
    std::lock_guard lock(mutex_);
    const auto found = entries_.find(block);
    return found != entries_.end() && found->second.prefetched;
  }

  bool has_advice(Block* block) const {
    return !empty() && !statements(block).empty();
  }

  /// Who frees a block has it: nobody else writes to its entry, and its own writes come before.
  bool empty() const {
    return count_.load(std::memory_order_relaxed) == 0;
  }

  Entry take(Block* block) {
    std::lock_guard lock(mutex_);
    auto node = entries_.extract(block);
    if (node.empty()) {
      return {};
    }
    count_.fetch_sub(1, std::memory_order_relaxed);
    return std::move(node.mapped());
  }

 private:
  Entry& entry(Block* block) {
    const auto [found, added] = entries_.try_emplace(block);
    if (added) {
      count_.fetch_add(1, std::memory_order_relaxed);
    }
    return found->second;
  }

  mutable std::mutex mutex_; // leaf
  std::unordered_map<Block*, Entry> entries_;
  std::atomic<std::size_t> count_{0}; ///< of entries
};

/// The pages of one call, by the blocks that they are of.
struct Target {
  ManagedRuntime& runtime;
  Ranges pages;
  std::vector<std::pair<Block*, Ranges>> by_block;

  /// In the book before in the runtime: should the runtime fail half-way, what it took is undone all the same.
  void set(Statement statement) const {
    for (const auto& [block, pages_of_block] : by_block) {
      Book::get().set(block, statement, pages_of_block);
    }
    call(statement.first, statement.second);
  }

  void unset(Statement statement) const {
    call(undoing(statement.first), statement.second);
    strike(statement);
  }

  /// From the book alone.
  void strike(Statement statement) const {
    for (const auto& [block, pages_of_block] : by_block) {
      Book::get().unset(block, statement, pages_of_block);
    }
  }

  void call(Advice advice, Location location) const {
    for (const Range& range : pages) {
      runtime.advise(range.data(), range.bytes(), advice, location);
    }
  }

  /// What the book has of one kind on these blocks.
  std::vector<Location> locations(Advice set) const {
    std::vector<Location> found;
    for (const auto& [block, pages_of_block] : by_block) {
      for (const auto& [advice, location] : Book::get().statements(block)) {
        if (advice == set && std::ranges::find(found, location) == found.end()) {
          found.push_back(location);
        }
      }
    }
    return found;
  }
};

Target target_of(const std::vector<at::Tensor>& tensors) {
  Target target{Context::get().runtime(), {}, {}};
  const std::size_t page = Machine::get().page_bytes;
  const std::vector<Owned> owned = owned_bytes(tensors, page);
  target.pages = page_ranges(owned, page);
  const CachingManagedAllocator& allocator = Context::get().managed_allocator();
  for (const Owned& one : owned) {
    const auto begin = reinterpret_cast<std::uintptr_t>(allocator.data(one.block));
    const Range around = rounded_outwards({begin, begin + allocator.bytes(one.block)}, page);
    if (Ranges pages = within(target.pages, around); !pages.empty()) {
      target.by_block.emplace_back(one.block, std::move(pages));
    }
  }
  return target;
}

void check(Location location) {
  const int devices = Context::get().runtime().device_count();
  TORCH_CHECK_VALUE(location.index >= -1 && location.index < devices, "advice about device ", location.index,
                    "; there are the CPU and ", devices, " devices, from 0");
}

/// The runtime takes a device for all advice, even where it means nothing.
constexpr Location kAny = Location::device(0);

} // namespace

void advise(const std::vector<at::Tensor>& tensors, const AdviceChange& change) {
  if (change.preferred_location && *change.preferred_location) {
    check(**change.preferred_location);
  }
  for (const Location location : change.accessed_by.value_or(std::vector<Location>{})) {
    check(location);
  }
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        !tensor.has_storage() || !is_from_allocator(data_behind_labels(tensor.storage().data_ptr())),
        "advice about a tensor in the memory of an allocator that was chosen for it: it would stay on the "
        "pages for the tensors after it; accepted: managed tensors made outside of such a scope");
  }
  if (!Machine::get().takes_hints()) {
    return;
  }
  const Target target = target_of(tensors);
  if (change.read_mostly) {
    const Statement read_mostly{Advice::kSetReadMostly, kAny};
    *change.read_mostly ? target.set(read_mostly) : target.unset(read_mostly);
  }
  if (change.preferred_location) {
    // Of a page's preferred location the runtime forgets the earlier one by itself; the book does not.
    const std::optional<Location> preferred = *change.preferred_location;
    for (const Location earlier : target.locations(Advice::kSetPreferredLocation)) {
      if (earlier != preferred) {
        target.strike({Advice::kSetPreferredLocation, earlier});
      }
    }
    if (preferred) {
      target.set({Advice::kSetPreferredLocation, *preferred});
    } else {
      target.call(Advice::kUnsetPreferredLocation, kAny);
    }
  }
  if (change.accessed_by) {
    for (const Location earlier : target.locations(Advice::kSetAccessedBy)) {
      if (std::ranges::find(*change.accessed_by, earlier) == change.accessed_by->end()) {
        target.unset({Advice::kSetAccessedBy, earlier});
      }
    }
    for (const Location location : *change.accessed_by) {
      target.set({Advice::kSetAccessedBy, location});
    }
  }
}

void note_prefetch(Block* block) {
  Book::get().note_prefetch(block);
}

bool has_prefetch(Block* block) {
  return Book::get().has_prefetch(block);
}

bool has_advice(Block* block) {
  return Book::get().has_advice(block);
}

void forget_hints(Block* block) noexcept {
  if (Book::get().empty() || Context::get().forked()) {
    return;
  }
  try {
    const Entry entry = Book::get().take(block); // by name: a loop over a temporary's member outlives it
    for (const auto& [statement, pages] : entry.advised) {
      for (const Range& range : pages) {
        Context::get().runtime().advise(range.data(), range.bytes(), undoing(statement.first), statement.second);
      }
    }
  } catch (...) {
    // A hint that could not be taken back: slower at worst.
  }
}

} // namespace torch_uvm
