// Advice about the pages of tensors, and the book of which block carries which.
//
// Advice is the runtime's note on pages, and pages pass to other tensors when a block is freed. So what was
// set is remembered by block, and undone before the block goes back. A page that two blocks share, because
// they were advised together, loses its advice when the first of them goes.
//
// The book's mutex is a leaf: no runtime, no allocator is called with it held.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "runtime/location.h"

namespace torch_uvm {

/// What to change; what is nullopt stays as it is.
struct AdviceChange {
  std::optional<bool> read_mostly;
  std::optional<std::optional<Location>> preferred_location; ///< nullopt within: none any more
  std::optional<std::vector<Location>> accessed_by; ///< in place of the set there was
};

/// Gives advice about the pages that are all the tensors' own; others are passed over, as by prefetch.
/// \throws c10::Error for a location that does not exist; nothing has changed then
void advise(const std::vector<at::Tensor>& tensors, const AdviceChange& change);

/// Remembers that part of a block was prefetched elsewhere than its home, until the block is freed.
void note_prefetch(Block* block);
bool has_prefetch(Block* block);

/// Whether any page of a block has advice that has not been taken back.
bool has_advice(Block* block);

/// Undoes all advice on a block that is about to be freed. One relaxed load where no block has any. In a
/// forked child nothing is undone: the pages are the parent's.
void forget_hints(Block* block) noexcept;

} // namespace torch_uvm
