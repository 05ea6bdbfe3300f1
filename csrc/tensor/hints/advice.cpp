// Memory advice about the pages of tensors, recorded by block (tensor/storage/advice_registry.h).
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/error.h"
#include "tensor/hints/hints.h"
#include "tensor/hints/owned_bytes.h"
#include "tensor/process/context.h"
#include "tensor/process/machine.h"
#include "tensor/storage/advice_registry.h"
#include "tensor/storage/labels.h"
#include "tensor/storage/user_allocators.h"

namespace torch_uvm {
namespace {

/// The pages that one call advises, and their blocks.
struct Target {
  ManagedRuntime& runtime;
  Ranges pages;
  std::vector<Block*> blocks;
  std::vector<Block*> whole; ///< of these, the ones whose own pages are all among `pages`

  /// Recorded before the runtime is called: if the runtime fails half-way, freeing the block still undoes the advice.
  void set(Statement statement) const {
    for (Block* const block : blocks) {
      set_advice(block, statement);
    }
    call(statement.first, statement.second);
  }

  void unset(Statement statement) const {
    call(undoing(statement.first), statement.second);
    strike(statement);
  }

  /// Removes the advice from the record only. A block that keeps it on other pages is recorded until it is freed.
  void strike(Statement statement) const {
    for (Block* const block : whole) {
      unset_advice(block, statement);
    }
  }

  void call(Advice advice, Location location) const {
    for (const Range& range : pages) {
      runtime.advise(range.data(), range.bytes(), advice, location);
    }
  }

  /// The recorded locations of one kind of advice on these blocks.
  std::vector<Location> locations(Advice set) const {
    std::vector<Location> found;
    for (Block* const block : blocks) {
      for (const auto& [advice, location] : advice_on(block)) {
        if (advice == set && std::ranges::find(found, location) == found.end()) {
          found.push_back(location);
        }
      }
    }
    return found;
  }
};

Target target_of(const std::vector<at::Tensor>& tensors) {
  Target target{Context::get().runtime(), {}, {}, {}};
  const std::size_t page = Machine::get().page_bytes;
  const std::vector<Owned> owned = owned_bytes(tensors, page);
  target.pages = page_ranges(owned, page);
  for (const Owned& one : owned) {
    const Range bytes = range_of(one.block);
    if (!within(target.pages, rounded_outwards(bytes, page)).empty()) {
      target.blocks.push_back(one.block);
      const Range own = rounded_inwards(bytes, page);
      if (own.bytes() == 0 || within(target.pages, own) == Ranges{own}) {
        target.whole.push_back(one.block);
      }
    }
  }
  return target;
}

/// A placeholder: the runtime requires a location even for advice that ignores it.
constexpr Location kAny = Location::device(0);

} // namespace

void advise(const std::vector<at::Tensor>& tensors, const AdviceChange& change) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(
        !tensor.has_storage() || !is_from_allocator(data_behind_labels(data_of(tensor.storage()))),
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
    // In the runtime a new preferred location replaces the earlier one; in the record it has to be removed.
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

} // namespace torch_uvm
