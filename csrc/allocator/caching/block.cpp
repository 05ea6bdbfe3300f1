#include "allocator/caching/block.h"

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

namespace torch_uvm {

FreeIndex::Entry FreeIndex::make_entry() {
  Set scratch;
  scratch.insert(Key{});
  Entry entry;
  entry.node_ = scratch.extract(scratch.begin());
  return entry;
}

void FreeIndex::insert(Block* block) noexcept {
  Entry& entry = block->entry;
  entry.node_.value() = Key{block->bytes, block->address, block};
  entry.position_ = blocks_.insert(std::move(entry.node_)).position;
}

void FreeIndex::erase(Block* block) noexcept {
  block->entry.node_ = blocks_.extract(block->entry.position_);
}

void FreeIndex::update(Block* block) noexcept {
  const Set::iterator position = block->entry.position_;
  const Key key{block->bytes, block->address, block};
  // Fast path: a large block that shrinks and grows by small pieces usually keeps its position. No rebalancing.
  const bool grows = *position < key;
  const Set::iterator next = std::next(position);
  const bool stays =
      grows ? next == blocks_.end() || key < *next : position == blocks_.begin() || *std::prev(position) < key;
  if (stays) {
    const_cast<Key&>(*position) = key; // the order is unchanged
  } else {
    erase(block);
    insert(block);
  }
}

Block* FreeIndex::best_fit(std::size_t bytes, std::size_t alignment) const noexcept {
  auto found = blocks_.lower_bound(Key{bytes, 0, nullptr});
  if (alignment == kBlockAlignment || found == blocks_.end()) {
    return found == blocks_.end() ? nullptr : found->block;
  }
  constexpr int kMaxTried = 16;
  for (int tried = 0; tried < kMaxTried && found != blocks_.end(); ++tried, ++found) {
    if (round_up(found->address, alignment) - found->address + bytes <= found->bytes) {
      return found->block;
    }
  }
  found = blocks_.lower_bound(Key{bytes + alignment - kBlockAlignment, 0, nullptr}); // large enough at any address
  return found == blocks_.end() ? nullptr : found->block;
}

Block* FreeIndex::lowest_fit(std::size_t bytes) const noexcept {
  const auto fits = std::ranges::subrange(blocks_.lower_bound(Key{bytes, 0, nullptr}), blocks_.end());
  const auto lowest = std::ranges::min_element(fits, {}, &Key::address);
  return lowest == fits.end() ? nullptr : lowest->block;
}

bool FreeIndex::holds(const Block* block) const noexcept {
  const auto found = blocks_.find(Key{block->bytes, block->address, nullptr});
  return found != blocks_.end() && found->block == block && block->entry.filed() &&
         found == Set::const_iterator(block->entry.position_);
}

} // namespace torch_uvm
