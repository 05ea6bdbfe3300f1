// The memory advice on each block, and which blocks were prefetched.
//
// The runtime attaches advice to pages, and a freed block's pages are reused for other tensors. So advice is recorded
// by block, and undone on all of the block's pages before it is freed. A page that two blocks share (because they were
// advised together) loses its advice when the first of them is freed.
#pragma once

#include <utility>
#include <vector>

#include "allocator/caching/caching_managed_allocator.h"
#include "tensor/storage/ranges.h"

namespace torch_uvm {

/// One piece of advice about a page: the advice that sets it, and its location argument.
using Statement = std::pair<Advice, Location>;

/// The advice that undoes a set advice.
Advice undoing(Advice set);

/// Records that pages of a block have this advice, or that none has it any more.
void set_advice(Block* block, Statement statement);
void unset_advice(Block* block, Statement statement);
std::vector<Statement> advice_on(Block* block);
/// Whether any page of a block has advice that was not undone.
bool has_advice(Block* block);

/// Records, until the block is freed, that part of it was prefetched away from its home.
void note_prefetch(Block* block);
bool has_prefetch(Block* block);

/// The addresses of a managed block.
Range range_of(Block* block);

/// Undoes all advice on a block that is about to be freed. One relaxed load if no block has advice. A no-op in a forked
/// child, where the pages belong to the parent.
void forget_hints(Block* block) noexcept;

} // namespace torch_uvm
