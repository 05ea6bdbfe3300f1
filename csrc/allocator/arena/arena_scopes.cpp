// Marks and resets of an arena: what is reclaimed, what outlives it, and which streams reuse must wait for.
#include <algorithm>
#include <iterator>

#include "allocator/arena/arena_chunk.h"
#include "runtime/error.h"

namespace torch_uvm {

Arena::Mark Arena::push() {
  const std::lock_guard lock(mutex_);
  marks_.push_back(last_mark_ + 1);
  for (const std::unique_ptr<Chain>& chain : chains_) {
    close(*chain); // closed, so that the next allocation starts a new span
  }
  return ++last_mark_;
}

Outlived Arena::pop(Mark mark) {
  const std::lock_guard lock(mutex_);
  if (marks_.empty() || marks_.back() != mark) {
    const bool is_open = std::ranges::find(marks_, mark) != marks_.end();
    throw InvalidArgument("pop of mark " + std::to_string(mark) + ", which is not " +
                          (is_open ? "the innermost: mark " + std::to_string(marks_.back()) + " comes first"
                                   : "open: it was popped, or a reset closed it, or this arena never had it"));
  }
  const std::size_t depth = marks_.size();
  marks_.pop_back();
  Outlived outlived;
  if (in_forked_child()) {
    return outlived;
  }
  Ordering ordering(*this);
  for (const std::unique_ptr<Chain>& chain : chains_) {
    close(*chain);
    for (const std::unique_ptr<Chunk>& chunk : chain->chunks) {
      const Outlived here = outlived_since(*chunk, depth);
      outlived.allocations += here.allocations;
      outlived.bytes += here.bytes;
    }
    rewind(*chain, depth, ordering);
  }
  return outlived;
}

Outlived Arena::outlived_since(const Chunk& chunk, std::size_t depth) const {
  Outlived outlived;
  const std::lock_guard lock(bump_);
  for (const std::unique_ptr<Span>& span : chunk.spans) {
    if (span->depth >= depth) {
      outlived.allocations += span->allocations;
      outlived.bytes += span->bytes;
    }
  }
  return outlived;
}

/// Removes spans of at least `depth` without live allocations from the ends of the blocks of a closed chain. The
/// remaining ones become part of the outer scope.
void Arena::rewind(Chain& chain, std::size_t depth, Ordering& ordering) {
  const auto can_go = [&](const Span& span) {
    {
      const std::lock_guard lock(bump_);
      if (span.allocations != 0) {
        return false;
      }
    }
    return ordering.after(span, chain);
  };
  for (const std::unique_ptr<Chunk>& chunk : chain.chunks) {
    auto& spans = chunk->spans;
    while (!spans.empty() && spans.back()->depth >= depth && can_go(*spans.back())) {
      chunk->top = spans.back()->begin;
      spans.pop_back();
    }
    for (const std::unique_ptr<Span>& span : spans) {
      span->depth = std::min(span->depth, depth - 1);
    }
  }
  chain.spare.reserve(chain.spare.size() + chain.chunks.size());
  const auto empty =
      std::ranges::stable_partition(chain.chunks, [](const auto& chunk) { return !chunk->spans.empty(); }).begin();
  std::move(empty, chain.chunks.end(), std::back_inserter(chain.spare));
  chain.chunks.erase(empty, chain.chunks.end());
}

Outlived Arena::reset() {
  Outlived outlived;
  if (in_forked_child()) {
    return outlived;
  }
  Chunks given_up; // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  marks_.clear();
  Ordering ordering(*this);
  for (const std::unique_ptr<Chain>& chain : chains_) {
    const Outlived here = restart(*chain, ordering, given_up);
    outlived.allocations += here.allocations;
    outlived.bytes += here.bytes;
  }
  return outlived;
}

/// Reuses a single free block from its start. Replaces several by one block of their total size, made on demand.
/// Retires blocks that are in use.
Outlived Arena::restart(Chain& chain, Ordering& ordering, Chunks& given_up) {
  close(chain);
  Outlived outlived;
  std::size_t total = 0;
  chain.spare.reserve(chain.spare.size() + chain.chunks.size());
  for (std::unique_ptr<Chunk>& chunk : chain.chunks) {
    const std::size_t bytes = chunk->memory.bytes;
    const Outlived here = retire(chunk);
    outlived.allocations += here.allocations;
    outlived.bytes += here.bytes;
    if (chunk != nullptr) {
      chain.spare.push_back(std::move(chunk));
    } else {
      total += bytes;
    }
  }
  chain.chunks.clear();
  for (const std::unique_ptr<Chunk>& chunk : chain.spare) {
    total += chunk->memory.bytes;
  }
  if (chain.spare.size() == 1 && restart(*chain.spare.front(), chain, ordering)) {
    chain.chunks.swap(chain.spare);
    chain.next = grown(chain.chunks.front()->memory.bytes);
    open(chain);
  } else if (total != 0) {
    given_up.reserve(given_up.size() + chain.spare.size());
    std::ranges::move(chain.spare, std::back_inserter(given_up));
    chain.spare.clear();
    chain.next = std::max(options_.initial, total);
  }
  return outlived;
}

/// If a block is in use, resets the pointer and leaves the block to its allocations: the last free deletes it.
Outlived Arena::retire(std::unique_ptr<Chunk>& chunk) noexcept {
  Outlived outlived;
  const std::lock_guard lock(bump_);
  for (const std::unique_ptr<Span>& span : chunk->spans) {
    outlived.allocations += span->allocations;
    outlived.bytes += span->bytes;
  }
  if (outlived.allocations != 0) {
    chunk->retired = true;
    static_cast<void>(chunk.release());
  }
  return outlived;
}

/// \return false if it cannot be known when other streams are done with the block
bool Arena::restart(Chunk& chunk, const Chain& chain, Ordering& ordering) noexcept {
  auto& spans = chunk.spans;
  if (!std::ranges::all_of(spans, [&](const auto& span) { return ordering.after(*span, chain); })) {
    return false;
  }
  if (!spans.empty()) { // keep the first span, which starts at the start of the block
    spans.resize(1);
    spans.front()->depth = 0;
    spans.front()->others.clear();
  }
  chunk.top = 0;
  return true;
}

} // namespace torch_uvm
